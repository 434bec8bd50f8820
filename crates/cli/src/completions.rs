//! Completions for bash, zsh and fish: clap's, and names of policies where one is wanted.
//!
//! The names are asked of `stockade policy list` when a user asks for them, so that a host's
//! own are among them. Numbers of runs and other values of the host are not completed.

use std::io;

use clap_complete::{Shell, generate};

use crate::{
    ExitCode,
    args::{Cli, CompletedShell, without_nested_help},
    output::print_text,
};

/// Takes clap's function for all but policies. `$1` is the program as it was typed, `$2` the
/// word, `$3` the one before it; bash takes `=` for a word of its own. Where no policy fits,
/// readline completes files.
const BASH: &str = r#"
_stockade_or_policies() {
    local word=$2 option=$3
    [ "$option" != = ] || option=${COMP_WORDS[COMP_CWORD - 2]}
    if [ "$word" = = ]; then word=''; fi
    case $option in
    --policy | --against) ;;
    *)
        case "${COMP_WORDS[1]} ${COMP_WORDS[2]} $COMP_CWORD $word" in
        *' '[12]' '* | *' -'*) _stockade "$@" && return ;;
        'policy check '* | 'policy show '* | 'policy explain '* | 'policy diff '*) ;;
        *) _stockade "$@" && return ;;
        esac
        ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$("$1" policy list 2>/dev/null | cut -d ' ' -f 1)" -- "$word")
}
complete -F _stockade_or_policies -o nosort -o bashdefault -o default stockade
"#;

const ZSH: &str = r#"
(( $+functions[_stockade_policies] )) ||
_stockade_policies() {
    local policies=(${${(f)"$(_call_program policies stockade policy list 2>/dev/null)"}%% *})
    _alternative "policies:policy:compadd -a policies" 'files:file:_files'
}
"#;
/// Values that clap's script completes as anything, and that are policies.
const ZSH_VALUES: &[&str] = &[
    "]:NAME|FILE",
    "[Under this policy]:NAME",
    " -- Names or files",
    " -- A name or a file",
    r" -- The ceiling\: a name or a file",
    " -- The policy to compare with it",
];
/// What follows the functions in clap's script.
const ZSH_END: &str = "\nif [ \"$funcstack[1]\" = \"_stockade\" ]; then\n";

const FISH: &str = r#"
function __stockade_policies
    stockade policy list 2>/dev/null | string replace -r '^(\S+)\s+' '$1\t'
end
complete -c stockade -n "not __fish_stockade_needs_command" -l policy -r -a "(__stockade_policies)"
complete -c stockade -n "__fish_stockade_using_subcommand policy" -l against -r -a "(__stockade_policies)"
complete -c stockade -n "__fish_stockade_using_subcommand policy; and __fish_seen_subcommand_from check show explain diff" -a "(__stockade_policies)"
"#;

pub(crate) fn print(shell: CompletedShell) -> anyhow::Result<ExitCode> {
    print_text(&script(shell)?)?;
    Ok(ExitCode::SUCCESS)
}

/// A shell's script.
///
/// # Errors
/// clap's script is another than the one that names of policies are added to.
fn script(shell: CompletedShell) -> io::Result<String> {
    let mut command = without_nested_help(Cli::described());
    let (of_clap, policies) = match shell {
        CompletedShell::Bash => (Shell::Bash, BASH),
        CompletedShell::Zsh => (Shell::Zsh, ""),
        CompletedShell::Fish => (Shell::Fish, FISH),
    };
    let mut script = Vec::new();
    generate(of_clap, &mut command, "stockade", &mut script);
    let script = String::from_utf8(script).map_err(io::Error::other)? + policies;
    if shell == CompletedShell::Zsh { with_zsh_policies(script) } else { Ok(script) }
}

fn with_zsh_policies(mut script: String) -> io::Result<String> {
    for value in ZSH_VALUES {
        replace(&mut script, &format!("{value}:_default'"), &format!("{value}:_stockade_policies'"))?;
    }
    replace(&mut script, ZSH_END, &format!("{ZSH}{ZSH_END}"))?;
    Ok(script)
}

fn replace(script: &mut String, from: &str, to: &str) -> io::Result<()> {
    if !script.contains(from) {
        return Err(io::Error::other(format!("clap's completions have no {from:?}")));
    }
    *script = script.replace(from, to);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shell_has_its_script_with_names_of_policies() {
        for shell in [CompletedShell::Bash, CompletedShell::Zsh, CompletedShell::Fish] {
            assert!(
                script(shell).is_ok_and(|script| script.contains("stockade policy list") || script.contains("\"$1\" policy list")),
                "{shell:?}"
            );
        }
    }
}
