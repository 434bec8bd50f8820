//! Promises about policies as a whole: one test for each.
//!
//! Every refusal here is caused by one changed line of a policy that is otherwise good, so
//! that it is that line which is refused.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use stockade_protocol::{
    LimitKey,
    screen::{Action, Rule},
};

use crate::{
    EXAMPLES, LookupContext, PolicyError, SHIPPED, load, load_shipped,
    lookup::load_text,
    model::{Degradable, Origin, Policy, SharedBy, SocketFamily, Template},
    names, show,
    trust::tests::Scene,
};

/// A policy that extends nothing, to be changed line by line.
fn base() -> String {
    show(&load_shipped("default").unwrap())
}

fn child(body: &str) -> String {
    format!("schema = 1\nextends = \"default\"\n{body}")
}

fn refusal(text: &str) -> String {
    match load_text(text) {
        Err(PolicyError::Invalid(report)) => report.to_string(),
        other => panic!("{text}\n{other:?}"),
    }
}

/// The default policy with one text exchanged.
fn changed(from: &str, to: &str) -> String {
    let text = base();
    assert!(text.contains(from), "{from} is not in\n{text}");
    text.replacen(from, to, 1)
}

fn refused(from: &str, to: &str, said: &str) {
    let report = refusal(&changed(from, to));
    assert!(report.contains(said), "{to}: {report}");
    assert!(report.contains("--> test.toml:"), "{report}");
    assert!(report.contains('^'), "{report}");
}

#[test]
fn every_shipped_policy_loads() {
    for (name, _) in SHIPPED {
        let policy = load_shipped(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((policy.name.as_str(), &policy.origin), (*name, &Origin::Shipped));
        assert_eq!(policy.sha256.len(), 64);
    }
    for (name, text) in EXAMPLES {
        load_text(text).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn a_misspelt_key_is_shown_with_place_caret_and_likely_name() {
    let report = refusal("schema = 1\nextends = \"default\"\n\n[limits]\nwall = \"5s\"\nmemroy = \"1GiB\"\n");
    assert_eq!(
        report,
        "error: unknown key `memroy`\n \
         --> test.toml:6:1\n  \
           |\n\
         6 | memroy = \"1GiB\"\n  \
           | ^^^^^^ not a key of `[limits]`\n  \
           |\n  \
           = help: did you mean `memory`?"
    );
}

#[test]
fn unknown_keys_are_refused_at_every_level() {
    for (header, what) in [
        ("", "a policy"),
        ("[filesystem]", "`[filesystem]`"),
        ("[identity]", "`[identity]`"),
        ("[environment]", "`[environment]`"),
        ("[runtimes.python]", "`[runtimes.python]`"),
        ("[templates.bare]", "`[templates.bare]`"),
        ("[limits]", "`[limits]`"),
        ("[limits.max]", "`[limits.max]`"),
        ("[seccomp]", "`[seccomp]`"),
        ("[seccomp.allow]", "a list's changes"),
        ("[egress]", "`[egress]`"),
        ("[scratch]", "`[scratch]`"),
        ("[degrade]", "`[degrade]`"),
        ("[audit]", "`[audit]`"),
        ("[screen]", "`[screen]`"),
    ] {
        let report = refusal(&child(&format!("{header}\nnonsense = 1\n")));
        assert!(report.contains("unknown key `nonsense`") && report.contains(what), "{header}: {report}");
    }
}

#[test]
fn all_mistakes_of_a_file_are_reported_in_its_order() {
    let report = refusal(&child("[limits]\nwal = \"1s\"\nmemory = 5\n[seccomp]\nallow = { add = [\"opnat\"] }\n"));
    let at = |text: &str| report.find(text).unwrap_or_else(|| panic!("{text}: {report}"));
    assert!(at("did you mean `wall`?") < at("`memory` must be a size"));
    assert!(at("`memory` must be a size") < at("did you mean `openat`?"));
}

#[test]
fn unknown_names_are_refused_with_the_likely_one() {
    refused("\"urandom\"", "\"urandm\"", "did you mean `urandom`?");
    refused("\"inet6\"", "\"inet4\"", "unknown socket family");
    refused("\"TIOCGWINSZ\"", "\"TIOCGWINZ\"", "did you mean `TIOCGWINSZ`?");
    refused("\"openat\"", "\"opena\"", "did you mean `open`?");
    refused("\"cgroup\"", "\"cgroups\"", "did you mean `cgroup`?");
    refused("access = \"rw\"", "access = \"rx\"", "unknown access");
    refused("language = \"python\"", "language = \"pyton\"", "did you mean `python`?");
}

#[test]
fn impossible_values_are_refused() {
    refused("schema = 1", "schema = 2", "this version reads schema 1");
    refused("uid = 1000", "uid = 0", "must be above 0");
    refused("gid = 1000", "gid = \"x\"", "must be a whole number");
    refused("uid = 1000", "uid = 99999999999999999999", "too large");
    refused("user = \"sandbox\"", "user = \"a:b\"", "login name");
    refused("hostname = \"stockade\"", "hostname = \"a b\"", "host name");
    refused("\"/usr\"", "\"usr\"", "must be absolute");
    refused("\"/usr\"", "\"/usr/../etc\"", "`..`");
    refused("\"/usr\"", "\"/a\\u0000\"", "control character");
    refused("\"/usr\"", "\"/\"", "whole host");
    refused("wall = \"30s\"", "wall = 30", "a duration such as");
    refused("memory = \"512MiB\"", "memory = \"512MB\"", "a size such as");
    refused("processes = 64", "processes = true", "cannot be of this type");
    refused("\".env*\"", "\"/etc\"", "relative to scratch");
    refused("\".env*\"", "\"../x\"", "`..`");
    refused("TZ = \"UTC\"", "\"T Z\" = \"UTC\"", "cannot name a variable");
    refused("TZ = \"UTC\"", "HOME = \"/x\"", "cannot be set");
    refused("\"LC_*\"", "\"*\"", "cannot name a variable");
    refused("extension = \"py\"", "extension = \".py\"", "without the dot");
    refused("create = false", "create = 0", "true or false");
    refused("\"TCGETS\"", "\"TIOCSTI\"", "no policy may allow TIOCSTI");
    refused("\"TCGETS\"", "\"0x5412\"", "no policy may allow TIOCSTI");
}

#[test]
fn a_compiler_and_what_runs_its_output_belong_together() {
    let c = |compile: &str, more: &str| child(&format!("[runtimes.c]\nextension = \"c\"\n{compile}\n{more}\n"));
    let gcc = r#"compile = ["/usr/bin/gcc", "-o", "{output}", "{file}"]"#;
    let own = r#"command = ["{output}"]"#;
    let policy = load_text(&c(gcc, own)).unwrap();
    let runtime = &policy.runtimes["c"];
    assert!(runtime.compiles() && runtime.runs_output());
    assert_eq!(runtime.interpreter(), PathBuf::from("/usr/bin/gcc"));
    let java = load_text(&c(gcc, r#"command = ["/usr/bin/java", "-cp", "{output}", "Main"]"#)).unwrap();
    assert_eq!(java.runtimes["c"].interpreter(), PathBuf::from("/usr/bin/java"));
    // No words are no compiler.
    let plain = load_text(&c("compile = []", r#"command = ["/usr/bin/tcc", "-run", "{file}"]"#)).unwrap();
    assert!(!plain.runtimes["c"].compiles() && !plain.runtimes["c"].runs_output());
    for (compile, more, said) in [
        ("", own, "nothing makes `{output}` in `[runtimes.c]`"),
        (gcc, r#"command = ["/usr/bin/x", "{file}"]"#, "does not run what `compile` makes"),
        (r#"compile = ["gcc", "{output}", "{file}"]"#, own, "is not a usable path"),
        (r#"compile = ["{output}", "{output}", "{file}"]"#, own, "is not a usable path"),
        (r#"compile = ["/usr/bin/gcc", "{output}"]"#, own, "exactly one argument of `compile` holds `{file}`"),
        (r#"compile = ["/usr/bin/gcc", "{file}"]"#, own, "no argument of `compile` holds `{output}`"),
        (gcc, "command = [\"{output}\"]\ntemplate = \"bare\"", "`template` has no use for `c`"),
        (gcc, "command = [\"{output}\"]\nvenv = \"/opt/v\"", "`venv` has no use for `c`"),
        (gcc, r#"command = ["{output}", "{file}", "{file}"]"#, "exactly one argument of a command holds `{file}`"),
    ] {
        let report = refusal(&c(compile, more));
        assert!(report.contains(said) && report.contains('^'), "{compile} {more}: {report}");
    }
}

#[test]
fn a_command_names_a_program_and_the_code_exactly_once() {
    let good = "[\"/usr/bin/python3\", \"{file}\"]";
    for (bad, said) in [
        ("[\"/usr/bin/python3\"]", "0 of them here"),
        ("[\"/usr/bin/python3\", \"{file}\", \"{file}\"]", "2 of them here"),
        ("[\"{file}\"]", "its own interpreter"),
        ("[]", "needs a program"),
        ("[\"python3\", \"{file}\"]", "must be absolute"),
    ] {
        refused(good, bad, said);
    }
}

#[test]
fn aliases_are_unique() {
    refused("aliases = [\"py\", \"python3\"]", "aliases = [\"py\", \"node\"]", "is taken");
    refused("aliases = [\"py\", \"python3\"]", "aliases = [\"py\", \"py\"]", "is taken");
}

#[test]
fn a_language_may_be_an_alias_and_becomes_the_runtime() {
    assert_eq!(load_text(&changed("language = \"python\"", "language = \"js\"")).unwrap().language, "node");
    refused("language = \"python\"", "language = \"\"", "cannot name a language");
}

#[test]
fn no_guess_names_a_value_that_lets_code_do_more() {
    for (section, line, known) in [
        ("scratch", "access = \"r0\"", "rw, ro"),
        ("audit", "mode = \"of\"", "off, try, required"),
        ("screen", "process = \"alow\"", "allow, note, approve, deny"),
        ("runtimes.python.modules", "ctypes = \"alow\"", "allow, note, deny"),
    ] {
        let report = refusal(&child(&format!("[{section}]\n{line}\n")));
        assert!(report.contains(&format!("help: known: {known}")) && !report.contains("did you mean"), "{report}");
    }
}

#[test]
fn names_of_modules_and_events_are_checked_where_they_stand() {
    let modules = |lines: &str| child(&format!("[runtimes.python.modules]\n{lines}\n"));
    let report = refusal(&modules("ctypes = \"note\"\n\"os.sytem\" = \"deny\""));
    assert_eq!(
        report,
        "error: unknown event of os, `sytem`\n \
         --> test.toml:5:1\n  \
           |\n\
         5 | \"os.sytem\" = \"deny\"\n  \
           | ^^^^^^^^^^ not known\n  \
           |\n  \
           = help: did you mean `system`?"
    );
    for (line, said) in [
        ("ctypes = \"dney\"", "known: allow, note, deny"),
        ("ctypes = true", "must be a string"),
        ("os = \"note\"", "loaded before any code"),
        ("open = \"note\"", "write_outside"),
        ("os.system = \"deny\"", "in quotes"),
        ("\"a b\" = \"note\"", "not the name of a module or event"),
    ] {
        let report = refusal(&modules(line));
        assert!(report.contains(said) && report.contains("--> test.toml:4:"), "{line}: {report}");
    }
    let report = refusal(&child("[runtimes.bash.modules]\nctypes = \"note\"\n"));
    assert!(report.contains("`bash` is no Python"), "{report}");
}

#[test]
fn watched_modules_are_inherited_name_by_name_and_shown() {
    let first = load_text(&child("[runtimes.python.modules]\ndefault = \"note\"\n\"os.*\" = \"deny\"\n")).unwrap();
    let mut second = load_text(&show(&first)).unwrap();
    second.sha256.clone_from(&first.sha256);
    assert_eq!(first, second);
    assert!(load_shipped("default").unwrap().runtimes.values().all(|runtime| !runtime.modules.watches()));
}

#[test]
fn an_unknown_template_is_shown_with_the_known_ones_and_the_likely_one() {
    let report = refusal(&child("[templates.data]\n\n[runtimes.python]\ntemplate = \"dta\"\n"));
    assert_eq!(
        report,
        "error: unknown template `dta`\n \
         --> test.toml:6:12\n  \
           |\n\
         6 | template = \"dta\"\n  \
           |            ^^^^^ there is no [templates.dta]\n  \
           |\n  \
           = help: did you mean `data`? known: bare, data; define [templates.dta], or write `template = \"none\"`"
    );
    let (before, after) = base().split_once("\n[templates.\"bare\"]").map(|(before, after)| (before.to_owned(), after.to_owned())).unwrap();
    let (_, after) = after.split_once("\n[limits]").unwrap();
    let report = refusal(&format!("{before}\n[limits]{after}"));
    assert!(
        report.contains("unknown template `bare`") && report.contains("help: the policy has no template; define [templates.bare]"),
        "{report}"
    );
}

#[test]
fn values_of_templates_are_checked_where_they_stand() {
    let list = |names: &[String]| format!("imports = [{}]", names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", "));
    let modules = |count: usize| list(&(0..count).map(|number| format!("m{number}")).collect::<Vec<_>>());
    let good = |line: &str| load_text(&child(&format!("[templates.t]\n{line}\n"))).unwrap_or_else(|error| panic!("{line}: {error}"));
    for (line, said) in [
        ("imports = [\"os; exit()\"]".to_owned(), "`os; exit()` is not the name of a module"),
        ("imports = [\"a..b\"]".to_owned(), "parts behind dots"),
        ("imports = \"json\"".to_owned(), "`imports` must be a list of strings"),
        ("imports = { add = [\"json\"] }".to_owned(), "`imports` must be a list of strings"),
        ("imports = [\"json\", \"re\", \"json\"]".to_owned(), "`json` is already there"),
        (list(&["m".repeat(201)]), "201 bytes, at most 200"),
        (modules(33), "more than 32 names in `imports`"),
        ("warm = \"a\\u0000\"".to_owned(), "cannot hold NUL"),
        (format!("warm = \"{}\"", "#".repeat((16 << 10) + 1)), "16385 bytes, at most 16384"),
        ("warm = 1".to_owned(), "`warm` must be a string"),
        ("max_runs = 0".to_owned(), "`max_runs` cannot be 0"),
        ("max_runs = -1".to_owned(), "1 to 1000000"),
        ("max_runs = 1000001".to_owned(), "1 to 1000000"),
        ("max_runs = \"7\"".to_owned(), "`max_runs` must be a whole number"),
        ("max_age = \"999ms\"".to_owned(), "\"1s\" to \"24h\""),
        ("max_age = \"1441min\"".to_owned(), "\"1s\" to \"24h\""),
        ("max_age = \"none\"".to_owned(), "`none` is not an age of an image"),
        ("max_age = 600".to_owned(), "`max_age` must be a string"),
        ("images = 0".to_owned(), "1 to 16"),
        ("images = 17".to_owned(), "1 to 16"),
        ("images = \"2\"".to_owned(), "`images` must be a whole number"),
        ("shared_by = \"key\"".to_owned(), "`key`"),
        ("shared_by = true".to_owned(), "`shared_by` must be"),
        ("ready = -1".to_owned(), "0 to 256"),
        ("ready = 257".to_owned(), "0 to 256"),
    ] {
        let report = refusal(&child(&format!("[templates.t]\n{line}\n")));
        assert!(report.contains(said) && report.contains("--> test.toml:4:"), "{line}: {report}");
    }
    for line in [list(&["m".repeat(200)]), modules(32), format!("warm = \"{}\"", "#".repeat(16 << 10))] {
        good(&line);
    }
    for line in ["max_runs = 1", "max_runs = 1_000_000", "max_age = \"1s\"", "max_age = \"24h\"", "imports = []", "warm = \"\""] {
        good(line);
    }
    for line in ["images = 16", "ready = 0", "ready = 256", "shared_by = \"caller\""] {
        good(line);
    }
    let shared = good("images = 2\nshared_by = \"policy\"\nready = 3");
    assert_eq!(shared.templates["t"], Template { images: 2, shared_by: SharedBy::Policy, ready: 3, ..Template::default() });
    let usual = Template {
        imports: vec![],
        warm: None,
        max_runs: 1000,
        max_age: Duration::from_secs(600),
        images: 1,
        shared_by: SharedBy::Caller,
        ready: 0,
    };
    assert_eq!(good("").templates["t"], usual);
    // The names of templates, where they are made and where they are used.
    for (lines, said) in [
        ("[templates.none]", "stands for no template"),
        ("[templates.Data]", "`Data` cannot name a template"),
        ("[templates.\"a/b\"]", "`a/b` cannot name a template"),
        ("[templates]\nt = 1", "`t` must be a table"),
        ("[runtimes.python]\ntemplate = \"\"", "cannot name a template"),
        ("[runtimes.python]\ntemplate = false", "`template` must be a string"),
    ] {
        let report = refusal(&child(lines));
        assert!(report.contains(said), "{lines}: {report}");
    }
}

#[test]
fn templates_are_inherited_key_by_key_and_shown() {
    let scene = Scene::new();
    scene.write(
        "system/first.toml",
        &child("[templates.data]\nimports = [\"json\", \"re\"]\nwarm = \"x = 1\\ny = 2\"\nmax_runs = 7\nimages = 3\n[runtimes.python]\ntemplate = \"data\"\n"),
    );
    let second = |lines: &str| {
        scene.write("system/second.toml", &format!("schema = 1\nextends = \"first\"\n{lines}"));
        load("second", &context(&scene)).unwrap()
    };
    let whole = |policy: &Policy| policy.template_of("python").map(|(name, template)| (name.to_owned(), template.clone()));
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let of_first =
        Template { imports: names(&["json", "re"]), warm: Some("x = 1\ny = 2".to_owned()), max_runs: 7, images: 3, ..Template::default() };
    let data = |template: Template| Some(("data".to_owned(), template));
    assert_eq!(whole(&second("")), data(of_first.clone()));
    // A list of modules is written whole, other keys stay.
    let changed = second("[templates.data]\nimports = [\"csv\"]\nmax_age = \"1500ms\"\n");
    let expected = Template { imports: names(&["csv"]), max_age: Duration::from_millis(1500), ..of_first.clone() };
    assert_eq!(whole(&changed), data(expected));
    // What is shown reads back to the same.
    let mut again = load_text(&show(&changed)).unwrap();
    (again.name, again.origin, again.sha256) = (changed.name.clone(), changed.origin.clone(), changed.sha256.clone());
    assert_eq!(again, changed);
    // An empty text takes code away, "none" a template.
    assert_eq!(whole(&second("[templates.data]\nwarm = \"\"\n")), data(Template { warm: None, ..of_first }));
    let none = second("[runtimes.python]\ntemplate = \"none\"\n");
    assert!(none.runtimes["python"].template.is_none() && whole(&none).is_none() && none.templates.contains_key("data"));
    assert!(!show(&none).contains("template ="));
    assert_eq!(whole(&second("[runtimes.python]\ntemplate = \"bare\"\n")).unwrap().0, "bare");
    // A runtime goes by its own name, and one that is not there has none.
    assert!(none.template_of("bash").is_none() && none.template_of("py").is_none() && none.template_of("perl").is_none());
}

#[test]
fn shipped_policies_have_a_template_for_cpython_but_strict() {
    for (name, _) in SHIPPED {
        let policy = load_shipped(name).unwrap();
        let found: Vec<_> = policy.runtimes.keys().filter_map(|runtime| Some((runtime.as_str(), policy.template_of(runtime)?))).collect();
        let imports = |names: &[&str]| Template { imports: names.iter().map(|name| (*name).to_owned()).collect(), ..Template::default() };
        let expected = match *name {
            "strict" | "wasm" | "pyodide" => None,
            "data-science" => Some(("data", imports(&["numpy", "pandas", "matplotlib.pyplot"]))),
            _ => Some(("bare", imports(&[]))),
        };
        let expected: Vec<_> = expected.iter().map(|(name, template)| ("python", (*name, template))).collect();
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn a_system_call_is_in_one_list_only() {
    refused("kill = []", "kill = [\"openat\"]", "is in `allow` and in `kill`");
    refused("kill = []", "kill = [\"clone3\"]", "is in `kill` and in `enosys`");
    refused("\"openat\"", "\"openat\", \"openat\"", "already there");
}

#[test]
fn what_undoes_a_layer_cannot_be_allowed() {
    for (name, _) in names::FORBIDDEN_SYSCALLS {
        refused("\"openat\"", &format!("\"openat\", \"{name}\""), "no policy may allow");
    }
}

#[test]
fn more_ioctl_requests_than_the_filter_can_compare_are_refused_where_they_stand() {
    let requests = |count: usize| (0x9000..0x9000 + count).map(|number| format!("\"{number:#x}\"")).collect::<Vec<_>>().join(", ");
    let replaced = |count| child(&format!("[seccomp]\nioctl = {{ replace = [{}] }}\n", requests(count)));
    assert_eq!(load_text(&replaced(255)).unwrap().seccomp.ioctl.len(), 255);
    let report = refusal(&replaced(256));
    assert!(report.contains("more than 255 ioctl requests") && report.contains("--> test.toml:4:"), "{report}");
    // What is inherited counts.
    let report = refusal(&child(&format!("[seccomp]\nioctl = {{ add = [{}] }}\n", requests(255))));
    assert!(report.contains("more than 255 ioctl requests") && report.contains("--> test.toml:4:"), "{report}");
}

#[test]
fn limits_stay_below_their_maximum_and_memory_above_its_files() {
    refused("wall = \"30s\"", "wall = \"none\"", "above its own maximum");
    refused("processes = 64", "processes = 513", "at most 512");
    refused("memory = \"512MiB\"", "memory = \"192MiB\"", "must be above `tmp_size` and `scratch_size` together");
    assert!(load_text(&changed("memory = \"512MiB\"", "memory = \"193MiB\"")).is_ok());
}

#[test]
fn a_whitelist_is_read_once_into_rules_in_one_spelling() {
    let policy = load_text(&changed("whitelist = []", "whitelist = [\"PyPI.org.:8080,443\", \"[2001:DB8::/48]:22\"]")).unwrap();
    let texts: Vec<String> = policy.egress.whitelist.clone().into();
    assert_eq!(texts, ["pypi.org:443,8080", "[2001:db8::/48]:22"]);
    assert_eq!(load_text(&show(&policy)).unwrap().egress, policy.egress);
    let json = serde_json::to_string(&policy.egress).unwrap();
    assert_eq!(json, "{\"whitelist\":[\"pypi.org:443,8080\",\"[2001:db8::/48]:22\"]}");
    assert_eq!(serde_json::from_str::<crate::model::Egress>(&json).unwrap(), policy.egress);
    assert!(serde_json::from_str::<crate::model::Egress>("{\"whitelist\":[\"*:443\"]}").is_err());
}

#[test]
fn a_bad_rule_is_shown_with_place_caret_reason_and_remedy() {
    let report =
        refusal("schema = 1\nextends = \"default\"\n\n[egress]\nwhitelist = { add = [\"api.internal:8443\", \"10.0.5.7/24:443\"] }\n");
    assert_eq!(
        report,
        "error: `10.0.5.7/24:443` is not a rule of a whitelist\n \
         --> test.toml:5:43\n  \
           |\n\
         5 | whitelist = { add = [\"api.internal:8443\", \"10.0.5.7/24:443\"] }\n  \
           |                                           ^^^^^^^^^^^^^^^^^ `10.0.5.7/24` has bits beyond its prefix\n  \
           |\n  \
           = help: write \"10.0.5.7\" for the one host, or \"10.0.5.0/24\" for the network"
    );
    for (rule, said) in [
        ("*:443", "target is missing"),
        ("*.com:443", "top-level"),
        ("a.example:1/udp", "UDP is not supported"),
        ("a\\u0000b:1", "control"),
    ] {
        refused("whitelist = []", &format!("whitelist = [\"{rule}\"]"), said);
    }
    refused("whitelist = []", "whitelist = [1]", "a list of strings");
    refused("whitelist = []", "whitelist = \"pypi.org:443\"", "a list of strings");
    refused("whitelist = []", "whitelist = [\"a.example:1\", \"A.example:1\"]", "already there");
}

#[test]
fn a_whitelist_is_inherited_and_changed_like_any_list() {
    let rules = |body: &str| -> Vec<String> {
        let text = format!("schema = 1\nextends = \"pypi\"\n[egress]\nwhitelist = {body}\n");
        load_text(&text).unwrap_or_else(|error| panic!("{error}")).egress.whitelist.into()
    };
    assert_eq!(rules("{ add = [\"10.0.5.7:443\"] }"), ["pypi.org:443", "files.pythonhosted.org:443", "10.0.5.7:443"]);
    assert_eq!(rules("{ remove = [\"PyPI.org:443\"] }"), ["files.pythonhosted.org:443"]);
    assert_eq!(rules("{ replace = [] }"), Vec::<String>::new());
    let report = refusal("schema = 1\nextends = \"pypi\"\n[egress]\nwhitelist = { remove = [\"pypi.org:80\"] }\n");
    assert!(report.contains("not there to be removed"), "{report}");
}

#[test]
fn rules_that_conflict_or_have_no_effect_are_refused() {
    refused(
        "whitelist = []",
        "whitelist = [\"a.example:1-9\", \"a.example:5/tcp\"]",
        "conflicting rules for one port: `a.example:5/tcp` allows any TCP, `a.example:1-9` only TLS and HTTP",
    );
    assert!(load_text(&changed("whitelist = []", "whitelist = [\"a.example:1-4\", \"a.example:5/tcp\", \"*.example.org:5\"]")).is_ok());
    let report = refusal("schema = 1\nextends = \"strict\"\n[egress]\nwhitelist = { add = [\"a.example:1\"] }\n");
    assert!(report.contains("no program open an Internet socket") && report.contains("socket_families"), "{report}");
    let opened = "schema = 1\nextends = \"strict\"\n[seccomp]\nsocket_families = { add = [\"inet\"] }\n[egress]\nwhitelist = { add = [\"a.example:1\"] }\n";
    assert!(load_text(opened).is_ok());
}

#[test]
fn of_the_shipped_policies_only_pypi_lets_anything_leave() {
    for (name, _) in SHIPPED {
        assert_eq!(load_shipped(name).unwrap().egress.whitelist.is_empty(), *name != "pypi", "{name}");
    }
}

#[test]
fn review_is_default_in_all_but_what_is_done_about_findings() {
    let [of_default, review] = ["default", "review"].map(|name| load_shipped(name).unwrap());
    let told = review.screen.clone();
    assert!(told.wants_approval() && told.approvers.is_empty() && told.approval_time == 15 * 60 * 1000);
    // Nothing is milder.
    for rule in Rule::ALL {
        assert!(told.action(rule) >= of_default.screen.action(rule), "{}", rule.name());
    }
    let named = |policy: Policy| Policy {
        name: String::new(),
        description: String::new(),
        sha256: String::new(),
        screen: of_default.screen.clone(),
        ..policy
    };
    assert_eq!(named(review), named(of_default.clone()));
}

#[test]
fn approvers_need_something_to_approve() {
    let lines = |more: &str| child(&format!("[screen]\n{more}approvers = {{ add = [\"group:secops\"] }}\n"));
    assert!(refusal(&lines("")).contains("`approvers` has no effect"));
    load_text(&lines("process = \"approve\"\n")).unwrap();
    for (line, said) in [
        ("approvers = { add = [\"secops\"] }", "is not an approver"),
        ("approvers = { add = [\"uid:x\"] }", "not a number"),
        ("approvers = { add = [\"users:x\"] }", "unknown kind of approver"),
        ("approval_time = \"9s\"", "\"10s\" to \"24h\""),
        ("approval_time = \"none\"", "\"10s\" to \"24h\""),
        ("approval_time = \"25h\"", "\"10s\" to \"24h\""),
    ] {
        let report = refusal(&child(&format!("[screen]\nprocess = \"approve\"\n{line}\n")));
        assert!(report.contains(said), "{line}: {report}");
    }
}

#[test]
fn code_that_cannot_be_read_counts_as_what_stops_code() {
    let about_the_unread = |lines: &str| load_text(&child(&format!("[screen]\n{lines}"))).unwrap().screen.action(Rule::Screener);
    assert_eq!(about_the_unread("process = \"note\""), Action::Note);
    assert_eq!(about_the_unread("process = \"approve\""), Action::Approve);
    assert_eq!(about_the_unread("process = \"approve\"\nfork = \"deny\""), Action::Deny);
    // A policy's own line holds.
    assert_eq!(about_the_unread("process = \"deny\"\nscreener = \"note\""), Action::Note);
    // Nothing gets milder, and a policy that extends none has the same.
    let of = |text: &str| load_text(text).unwrap().screen.action(Rule::Screener);
    let strict = "schema = 1\ndescription = \"a child\"\nextends = \"strict\"\n[screen]\nprocess = \"approve\"\n";
    assert_eq!(of(strict), Action::Deny);
    let base = base();
    let (before, _) = base.split_once("[screen]").unwrap();
    assert_eq!(of(before), Action::Allow);
    assert_eq!(of(&format!("{before}[screen]\nprocess = \"deny\"\n")), Action::Deny);
}

#[test]
fn a_policy_that_extends_nothing_states_everything() {
    let base = base();
    // Screening is advice and may be turned off.
    let stated = base.split("[screen]").next().unwrap_or_default();
    for line in stated.lines().filter(|line| line.contains(" = ") && !line.starts_with(' ')) {
        let optional = [
            "aliases",
            "template",
            "imports",
            "max_runs",
            "max_age",
            "images",
            "shared_by",
            "writable_root",
            "sockets",
            "ready",
            "UV_USE_IO_URING",
            "PATH",
            "TMPDIR",
            "LANG",
            "TZ",
            "PYTHON",
        ];
        let several = line.ends_with('[');
        if !several && !optional.iter().any(|key| line.starts_with(key)) {
            let report = refusal(&base.replacen(&format!("{line}\n"), "", 1));
            assert!(report.contains("is missing"), "{line}: {report}");
        }
    }
    refused("[limits.max]\nwall = \"10min\"", "[limits.max]", "`wall` is missing from `[limits.max]`");
    assert!(refusal("schema = 1").contains("`seccomp` is missing"));
    assert!(refusal("").contains("start the file with `schema = 1`"));
}

#[test]
fn what_is_said_overrides_what_is_inherited_and_nothing_else_changes() {
    let parent = load_shipped("default").unwrap();
    let policy = load_text(&child(
        "[limits]\nwall = \"5s\"\n[environment.set]\nTZ = \"CET\"\n[runtimes.python]\nvenv = \"/opt/v\"\n[seccomp]\n\
         allow = { remove = [\"mknod\"], add = [\"vmsplice\"] }\nsocket_families = { replace = [\"unix\"] }\n",
    ))
    .unwrap();
    let mut expected = Policy { name: policy.name.clone(), origin: policy.origin.clone(), sha256: policy.sha256.clone(), ..parent };
    expected.limits.set(LimitKey::Wall, Some(5000));
    expected.environment.set.insert("TZ".into(), "CET".into());
    expected.runtimes.get_mut("python").unwrap().venv = Some(PathBuf::from("/opt/v"));
    expected.seccomp.allow.retain(|name| name != "mknod");
    expected.seccomp.allow.push("vmsplice".into());
    expected.seccomp.socket_families = vec![SocketFamily::Unix];
    assert_eq!(policy, expected);
}

#[test]
fn a_change_that_changes_nothing_is_refused() {
    for (body, said) in [
        ("[seccomp]\nallow = { add = [\"read\"] }", "already there"),
        ("[seccomp]\nallow = { remove = [\"ptrace\"] }", "not there to be removed"),
        ("[seccomp]\nallow = { add = [\"read\"], remove = [\"read\"] }", "both added and removed"),
        ("[seccomp]\nallow = [\"read\"]", "a bare list"),
        ("[seccomp]\nallow = {}", "needs either"),
        ("[seccomp]\nallow = { replace = [\"read\"], add = [\"write\"] }", "has both"),
        ("[filesystem]\nread_only_optional = { add = [\"/usr\"] }", "both optional and required"),
        ("[filesystem]\nsockets = { add = [\"/run/*.sock\"] }", "it takes in docker.sock"),
        ("[filesystem]\nsockets = { add = [\"/tmp/*/x\"] }", "`*` in the last name alone"),
        ("[runtimes.ruby]\nextension = \"rb\"", "`command` is missing"),
    ] {
        let report = refusal(&child(body));
        assert!(report.contains(said), "{body}: {report}");
    }
    assert!(refusal(&child("remove_runtimes = [\"perl\"]")).contains("not there to be removed"));
    assert!(refusal(&changed("kill = []", "kill = { add = [] }")).contains("extends nothing"));
}

#[test]
fn a_runtime_can_be_dropped() {
    let policy = load_text(&child("remove_runtimes = [\"node\"]")).unwrap();
    assert!(!policy.runtimes.contains_key("node") && policy.runtimes.contains_key("python"));
    assert!(refusal(&child("remove_runtimes = [\"python\"]")).contains("unknown runtime `python`"));
}

fn context(scene: &Scene) -> LookupContext {
    LookupContext { privileged: false, system_dir: scene.0.join("system"), user_dir: Some(scene.0.join("user")) }
}

fn described(text: &str) -> String {
    child(&format!("description = \"{text}\"\n"))
}

#[test]
fn a_name_is_sought_in_the_system_then_at_the_user_then_among_the_shipped() {
    let scene = Scene::new();
    let context = context(&scene);
    assert_eq!(load("strict", &context).unwrap().origin, Origin::Shipped);
    let user = scene.write("user/strict.toml", &described("user's"));
    assert_eq!(load("strict", &context).unwrap().origin, Origin::File(user));
    let system = scene.write("system/strict.toml", &described("system's"));
    let policy = load("strict", &context).unwrap();
    assert_eq!((policy.description.as_str(), policy.origin), ("system's", Origin::File(system)));
    let listed = crate::list_names(&context);
    assert_eq!(listed.iter().filter(|(name, _)| name == "strict").count(), 1);
}

#[test]
fn a_name_is_never_a_file_in_the_working_directory() {
    // The tests run in the crate's directory, where this file is.
    assert!(Path::new("Cargo.toml").exists());
    for name in ["Cargo", "Cargo.toml", "..", "", "Strict", "a b", "-x"] {
        let error = load(name, &context(&Scene::new())).unwrap_err();
        assert!(matches!(error, PolicyError::Name(_) | PolicyError::NotFound { .. }), "{name}: {error}");
    }
}

#[test]
fn an_unknown_name_says_where_it_was_sought_and_what_was_meant() {
    let error = load("defualt", &context(&Scene::new())).unwrap_err().to_string();
    assert!(error.contains("did you mean `default`?") && error.contains("/system") && error.contains("/user"), "{error}");
}

#[test]
fn a_path_is_read_rootless_wherever_it_is() {
    let scene = Scene::new();
    let path = scene.write("anywhere/own.toml", &described("mine"));
    let policy = load(path.to_str().unwrap(), &context(&scene)).unwrap();
    assert_eq!((policy.description.as_str(), &policy.origin), ("mine", &Origin::File(path)));
}

#[test]
fn a_privileged_launcher_ignores_the_users_directory_and_distrusts_the_users_files() {
    let scene = Scene::new();
    scene.write("user/own.toml", &described("mine"));
    let path = scene.write("own.toml", &described("mine"));
    let context = LookupContext { privileged: true, system_dir: PathBuf::new(), ..context(&scene) };
    assert!(matches!(load("own", &context), Err(PolicyError::NotFound { .. })));
    // The directory for temporary files may be written by everybody.
    assert!(matches!(load(path.to_str().unwrap(), &context), Err(PolicyError::Read(_))));
    assert!(load("default", &context).is_ok());
}

#[test]
fn what_a_distrusted_file_hides_is_not_used_instead() {
    let scene = Scene::new();
    scene.write("system/default.toml", &described("planted"));
    let context = LookupContext { privileged: true, ..context(&scene) };
    assert!(matches!(load("default", &context), Err(PolicyError::Read(_))));
}

#[test]
fn a_policy_that_extends_its_own_name_means_the_one_it_hides() {
    let scene = Scene::new();
    scene.write("system/default.toml", &described("the host's"));
    scene.write("user/default.toml", &described("the user's"));
    let policy = load("default", &context(&scene)).unwrap();
    assert_eq!(policy.description, "the host's");
}

#[test]
fn circles_and_long_chains_are_refused() {
    let scene = Scene::new();
    let extends = |name: &str| format!("schema = 1\nextends = \"{name}\"\n");
    scene.write("system/a.toml", &extends("b"));
    scene.write("system/b.toml", &extends("a"));
    let error = load("a", &context(&scene)).unwrap_err().to_string();
    assert!(error.contains("a -> b -> a"), "{error}");
    for index in 0..9 {
        scene.write(&format!("system/c{index}.toml"), &extends(&format!("c{}", index + 1)));
    }
    scene.write("system/c9.toml", &extends("default"));
    assert!(load("c3", &context(&scene)).is_ok());
    let error = load("c2", &context(&scene)).unwrap_err().to_string();
    assert!(error.contains("more than 8 policies"), "{error}");
    assert!(refusal("schema = 1\nextends = \"../x\"\n").contains("cannot name a policy"));
    assert!(refusal("schema = 1\nextends = \"defalt\"\n").contains("did you mean `default`?"));
}

#[test]
fn no_file_changes_what_a_shipped_policy_extends() {
    let scene = Scene::new();
    scene.write("system/default.toml", &described("the host's"));
    assert_eq!(load("strict", &context(&scene)).unwrap(), load_shipped("strict").unwrap());
}

#[test]
fn a_mistake_in_what_is_extended_is_shown_in_its_own_file() {
    let scene = Scene::new();
    scene.write("system/a.toml", "schema = 1\nextends = \"b\"\n");
    scene.write("system/b.toml", "schema = 1\nextends = \"default\"\nnonsense = 1\n");
    let error = load("a", &context(&scene)).unwrap_err().to_string();
    assert!(error.contains("/system/b.toml:3:1"), "{error}");
}

#[test]
fn the_hash_covers_the_file_and_everything_that_it_extends() {
    let scene = Scene::new();
    let hash = || load("a", &context(&scene)).unwrap().sha256;
    scene.write("system/a.toml", "schema = 1\nextends = \"b\"\n");
    scene.write("system/b.toml", &described("one"));
    let first = hash();
    assert_eq!(first, hash());
    scene.write("system/b.toml", &described("two"));
    let second = hash();
    scene.write("system/a.toml", "schema = 1\nextends = \"b\"\n# a comment counts\n");
    assert!(first != second && second != hash());
}

#[test]
fn shipped_limits_are_those_that_the_contract_promises() {
    let value = |policy: &str, key| load_shipped(policy).unwrap().limits.get(key);
    for (key, expected) in [
        (LimitKey::Wall, Some(30_000)),
        (LimitKey::Memory, Some(512 << 20)),
        (LimitKey::Processes, Some(64)),
        (LimitKey::Cpus, Some(1000)),
        (LimitKey::AddressSpace, None),
        (LimitKey::ScratchSize, Some(128 << 20)),
        (LimitKey::FileSize, Some(128 << 20)),
        (LimitKey::TmpSize, Some(64 << 20)),
        (LimitKey::OutputSize, Some(1 << 20)),
        (LimitKey::CollectSize, Some(16 << 20)),
        (LimitKey::OpenFiles, Some(1024)),
    ] {
        assert_eq!(value("default", key), expected, "{}", key.name());
    }
    assert_eq!(load_shipped("default").unwrap().limits_max.get(LimitKey::Wall), Some(600_000));
    assert_eq!(value("shell", LimitKey::Wall), None);
    assert_eq!(value("blueprint", LimitKey::AddressSpace), Some(100 << 20));
    assert_eq!((value("blueprint", LimitKey::Cpu), value("blueprint", LimitKey::Wall)), (Some(5000), Some(4000)));
    assert!(load_shipped("blueprint").unwrap().scratch.create);
}

#[test]
fn only_the_cgroup_of_an_ordinary_user_is_degradable_and_nothing_in_strict() {
    let default = load_shipped("default").unwrap().degrade;
    assert_eq!((default.rootless, default.root), (vec![Degradable::Cgroup], vec![]));
    let strict = load_shipped("strict").unwrap().degrade;
    assert!(strict.rootless.is_empty() && strict.root.is_empty());
}

#[test]
fn no_shipped_policy_allows_what_reaches_past_the_sandbox() {
    let never = "ptrace process_vm_readv process_vm_writev perf_event_open keyctl add_key request_key userfaultfd quotactl \
        reboot swapon swapoff acct settimeofday clock_settime adjtimex clock_adjtime iopl ioperm name_to_handle_at \
        fanotify_init lookup_dcookie process_madvise kcmp vhangup sethostname setdomainname syslog uselib seccomp";
    for (name, _) in SHIPPED {
        let policy = load_shipped(name).unwrap();
        for call in never.split_whitespace() {
            assert!(names::is_syscall(call), "{call}");
            assert!(!policy.seccomp.allow.iter().any(|allowed| allowed == call), "{name} allows {call}");
        }
    }
}

#[test]
fn every_shipped_policy_allows_what_the_executor_needs() {
    let needs = "read write close openat mkdirat fstat newfstatat lseek mmap munmap mprotect brk clone wait4 waitid execve \
        execveat kill prctl prlimit64 landlock_create_ruleset landlock_add_rule landlock_restrict_self unlinkat dup dup2 \
        dup3 fcntl exit exit_group getdents64 sendmsg close_range pread64 pwrite64 rt_sigaction rt_sigprocmask \
        rt_sigreturn sigaltstack set_tid_address set_robust_list arch_prctl rseq setsid setpgid ioctl statfs fstatfs \
        getpid gettid futex statx readlinkat umask chdir fchdir";
    for (name, _) in SHIPPED {
        let policy = load_shipped(name).unwrap();
        for call in needs.split_whitespace() {
            assert!(policy.seccomp.allow.iter().any(|allowed| allowed == call), "{name} lacks {call}");
        }
    }
}

#[test]
fn strict_allows_nothing_that_default_does_not() {
    let (default, strict) = (load_shipped("default").unwrap(), load_shipped("strict").unwrap());
    assert!(strict.seccomp.allow.iter().all(|call| default.seccomp.allow.contains(call)));
    assert!(strict.seccomp.ioctl.iter().all(|request| default.seccomp.ioctl.contains(request)));
    assert_eq!(strict.seccomp.socket_families, [SocketFamily::Unix]);
    for (key, value) in strict.limits.iter() {
        assert!(value.unwrap_or(u64::MAX) <= default.limits.get(key).unwrap_or(u64::MAX), "{}", key.name());
    }
}

#[test]
fn every_line_of_a_shipped_policy_has_its_reason() {
    for (name, text) in SHIPPED.iter().chain(EXAMPLES) {
        let mut reason_above = false;
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            let frame = line.starts_with('[') && line.ends_with(']') || matches!(line, "]" | "] }" | "") || line.ends_with('[');
            let reasoned = line.contains(" # ") || reason_above;
            assert!(line.starts_with('#') || frame || reasoned, "{name}:{}: {line}", index + 1);
            reason_above = line.starts_with('#');
            if line.starts_with('"') {
                let code = line.split('#').next().unwrap_or_default();
                assert!(code.matches("\",").count() <= 6, "{name}:{}: more than six names", index + 1);
                assert!(line.contains(" # "), "{name}:{}: {line}", index + 1);
            }
        }
    }
}

#[test]
fn broken_policies_are_refused_without_a_panic() {
    // A small generator with a fixed seed: the same files on every run.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % below as u64).unwrap()
    };
    for (_, text) in SHIPPED.iter().chain(EXAMPLES) {
        for round in 0..60 {
            let mut bytes = text.as_bytes().to_vec();
            for _ in 0..=random(4) {
                let at = random(bytes.len());
                match round % 3 {
                    0 => bytes[at] ^= 1 << random(8),
                    1 => bytes.truncate(at.max(1)),
                    _ => bytes.insert(at, b"\"'[]{}=.#\n\0\x1b,"[random(13)]),
                }
            }
            if let Err(error) = load_text(&String::from_utf8_lossy(&bytes)) {
                let text = error.to_string();
                assert!(!text.contains('\x1b') && !text.contains('\0'), "{text:?}");
            }
        }
    }
}

#[test]
fn hostile_text_is_not_shown_raw() {
    let report = refusal("schema = 1\n\"\\u001b[31m\" = 1\n");
    assert!(!report.contains('\x1b'), "{report:?}");
    let report = refusal("schema = 1\n\u{1b}[31m\n");
    assert!(!report.contains('\x1b'), "{report:?}");
}

#[test]
fn the_pages_name_every_key_and_every_shipped_policy() {
    let pages = concat!(include_str!("../../cli/help/policies.md"), include_str!("../../cli/help/screening.md"));
    let mut tables = vec![crate::keys::TOP];
    while let Some(keys) = tables.pop() {
        for key in keys {
            assert!(pages.contains(&format!("`{}`", key.name)) || pages.contains(&format!("[{}", key.name)), "{}", key.name);
            if let crate::keys::Kind::Table(below) | crate::keys::Kind::Named(_, below) = key.kind {
                tables.push(below);
            }
        }
    }
    for name in SHIPPED.iter().map(|(name, _)| *name).chain(LimitKey::ALL.map(LimitKey::name)) {
        assert!(pages.contains(&format!("`{name}`")), "{name}");
    }
}
