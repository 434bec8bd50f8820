//! Keys of the service: made, listed and checked by `stockade key`. A token is shown once, what is
//! refused changes nothing, and a file that others can write or read is no file of keys.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
    process::{Output, Stdio},
};

use serde_json::{Value, json};

use crate::support::{
    exec::{OWNER, program_path, run_with_stdin, stockade, text},
    policy_dir::{PolicyDirectory, command_under_etc},
    runner::{directory, is_root, test},
};

/// What a command line of `stockade key` said and how it ended.
struct Said {
    status: Option<i32>,
    stdout: String,
    stderr: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        Said { status: output.status.code(), stdout, stderr }
    }
}

impl Said {
    fn succeeded(self) -> Self {
        assert_eq!(self.status, Some(0), "{}{}", self.stdout, self.stderr);
        self
    }

    /// It ended with this status, printed no answer and said all of this.
    fn refused(self, status: i32, words: &[&str]) {
        assert_eq!((self.status, self.stdout.as_str()), (Some(status), ""), "{}", self.stderr);
        words.iter().for_each(|word| assert!(self.stderr.contains(word), "{word}: {}", self.stderr));
    }
}

fn key(words: &[&str], file: &Path) -> Said {
    stockade([&["key"], words, &["--file", text(file)]].concat()).output().unwrap().into()
}

/// A directory in which this user's keys are trusted, and the path of their file.
fn place() -> (PolicyDirectory, PathBuf) {
    let place = PolicyDirectory::new();
    let file = place.0.join("keys.toml");
    (place, file)
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Files of a directory, none of which is left over.
fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The hash of a token as another program has it.
fn hash_of(token: &str) -> String {
    let output = run_with_stdin(&mut crate::support::exec::run_under(&["sha256sum"]), token.as_bytes());
    format!("sha256:{}", String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap())
}

test!(Both, a_key_is_made_listed_and_checked);
fn a_key_is_made_listed_and_checked() {
    let (_place, file) = place();
    key(&["new", "grader", "--add"], &file).succeeded();
    key(&["new", "rl-1.b_c", "--policy", "default", "--policy", "strict", "--add"], &file).succeeded();
    let uid = "\n[[key]]\nuid = 1000\nid = \"local\"\npolicies = [\"strict\"]\nscopes = [\"watch\", \"run\"]\nexpires = 2020-02-29\n\
        cpu_per_hour = \"1h\"\nweight = 3\n";
    fs::write(&file, fs::read_to_string(&file).unwrap() + uid).unwrap();
    let checked = key(&["check"], &file).succeeded();
    assert_eq!(checked.stdout, format!("{}: ok (3 keys)\n", text(&file)));
    let listed = key(&["ls"], &file).succeeded().stdout;
    let rows: Vec<Vec<&str>> = listed.lines().map(|line| line.split_whitespace().collect()).collect();
    let [head, grader, rl, local] = &rows[..] else { panic!("{listed}") };
    assert_eq!(head.join(" "), "ID HASH OR UID POLICIES SCOPES EXPIRES");
    assert!(grader[0] == "grader" && grader[1].len() == 19 && grader[2..] == ["default", "run", "never"], "{listed}");
    assert!(rl[0] == "rl-1.b_c" && rl[2..] == ["default,strict", "run", "never"], "{listed}");
    assert_eq!(local.join(" "), "local uid 1000 strict run,watch 2020-02-29T00:00:00Z (expired)");
    let listed: Value = serde_json::from_str(&key(&["ls", "--json"], &file).succeeded().stdout).unwrap();
    assert_eq!((listed["schema"].clone(), listed["keys"].as_array().unwrap().len()), (json!(1), 3));
    assert!(fs::read_to_string(&file).unwrap().contains(listed["keys"][0]["hash"].as_str().unwrap()));
    let expected = json!({
        "id": "local", "hash": null, "uid": 1000, "policies": ["strict"], "scopes": ["run", "watch"], "running": 64, "waiting": 1000,
        "runs_per_minute": null, "cpu_per_hour_ms": 3_600_000, "weight": 3, "expires": "2020-02-29T00:00:00Z", "expired": true, "line": 13,
    });
    assert_eq!(listed["keys"][2], expected);
}

test!(Both, a_token_is_printed_once_and_is_nowhere_in_the_file);
fn a_token_is_printed_once_and_is_nowhere_in_the_file() {
    let (_place, file) = place();
    let made = key(&["new", "grader", "--add"], &file).succeeded();
    let token = made.stdout.strip_suffix('\n').unwrap();
    let random = token.strip_prefix("sd_grader_").unwrap();
    assert!(random.len() == 43 && random.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_')), "{token}");
    let written = fs::read_to_string(&file).unwrap();
    assert!(!written.contains(random) && !made.stderr.contains(random), "{written}{}", made.stderr);
    assert!(written.contains(&hash_of(token)), "{written}");
    for words in [&["ls"][..], &["ls", "--json"], &["check"]] {
        let said = key(words, &file).succeeded();
        assert!(!said.stdout.contains(random) && !said.stderr.contains(random));
    }
    assert_ne!(key(&["new", "grader"], &file).succeeded().stdout, made.stdout);
}

test!(Both, without_add_the_table_is_printed_and_nothing_is_written);
fn without_add_the_table_is_printed_and_nothing_is_written() {
    let (place, file) = place();
    let made = key(&["new", "grader", "--policy", "/srv/own policy.toml", "--scope", "watch", "--scope", "keep"], &file).succeeded();
    assert!(names(&place.0).is_empty());
    assert!(made.stderr.contains(&hash_of(made.stdout.trim_end())) && made.stderr.contains(text(&file)), "{}", made.stderr);
    // What was printed is the file's text as it is.
    fs::write(&file, &made.stderr).unwrap();
    set_mode(&file, 0o600);
    let listed: Value = serde_json::from_str(&key(&["ls", "--json"], &file).succeeded().stdout).unwrap();
    assert_eq!(listed["keys"][0]["policies"], json!(["/srv/own policy.toml"]));
    assert_eq!(listed["keys"][0]["scopes"], json!(["keep", "watch"]));
}

test!(Both, what_is_refused_leaves_the_file_as_it_was);
fn what_is_refused_leaves_the_file_as_it_was() {
    let (place, file) = place();
    let missing = key(&["new", "grader", "--policy", "no-such-policy", "--add"], &file);
    missing.refused(1, &["there is no policy `no-such-policy`"]);
    assert!(names(&place.0).is_empty());
    key(&["ls"], &file).refused(1, &["does not exist", "key new ID --add"]);
    key(&["check"], &file).refused(1, &["does not exist"]);
    key(&["new", "grader", "--add"], &file).succeeded();
    let good = fs::read_to_string(&file).unwrap();
    let wrong_weight = good.clone() + "weight = 0\n";
    for (before, words, status, said) in [
        (&good, &["new", "grader", "--add"][..], 1, &["keys.toml:1: there is a key `grader` already"][..]),
        (&good, &["new", "Grader", "--add"], 2, &["Grader cannot be the id of a key"]),
        (&good, &["new", "", "--add"], 2, &["cannot be the id of a key"]),
        (&good, &["new", &"a".repeat(65), "--add"], 2, &["1 to 64"]),
        (&good, &["new", "other", "--scope", "kep", "--add"], 2, &["--scope", "keep"]),
        (&good, &["new", "other", "--policy", "./x.toml", "--add"], 2, &["the absolute path of its file"]),
        (&good, &["new", "other", "--policy", "Strict", "--add"], 2, &["Strict names no policy"]),
        (&good, &["new", "other", "--policy", "strikt", "--add"], 1, &["did you mean `strict`?"]),
        (&wrong_weight, &["new", "other", "--add"], 1, &["keys.toml:6:10", "`weight` cannot be 0"]),
        (&wrong_weight, &["ls"], 1, &["keys.toml:6:10"]),
        (&wrong_weight, &["check"], 1, &["keys.toml:6:10", "1 to 1000"]),
        (&good.replace("id =", "di ="), &["check"], 1, &["keys.toml:2:1", "did you mean `id`?"]),
        (&good.replace("\"run\"", "\"kep\""), &["check"], 1, &["keys.toml:5:11", "known: run, keep, facade, watch"]),
        (&good.replace("\"default\"", "\"defualt\""), &["check"], 1, &["keys.toml:1: ", "did you mean `default`?"]),
        (&good.replace(']', ""), &["check"], 1, &["not TOML"]),
        (&"key = []\n".to_owned(), &["new", "other", "--add"], 1, &["not TOML"]),
    ] {
        fs::write(&file, before).unwrap();
        key(words, &file).refused(status, said);
        assert_eq!(&fs::read_to_string(&file).unwrap(), before, "{words:?}");
        assert_eq!(names(&place.0), ["keys.toml"], "{words:?}");
    }
    // The control.
    fs::write(&file, &good).unwrap();
    key(&["new", "other", "--policy", "strict", "--add"], &file).succeeded();
    key(&["check"], &file).succeeded();
}

test!(Both, two_keys_that_share_something_are_refused_at_the_second);
fn two_keys_that_share_something_are_refused_at_the_second() {
    let (_place, file) = place();
    let first = "[[key]]\nid = \"a\"\nuid = 1000\npolicies = [\"default\"]\n";
    let hash = format!("hash = \"sha256:{}\"", "0".repeat(64));
    for (one, other, said) in [
        (first.to_owned(), first.replace("1000", "1001"), ["keys.toml:6:6", "the key in line 2 has the id `a` already"]),
        (first.to_owned(), first.replace("\"a\"", "\"b\""), ["keys.toml:7:7", "the key in line 3 has the uid 1000 already"]),
        (
            first.replace("uid = 1000", &hash),
            first.replace("\"a\"", "\"b\"").replace("uid = 1000", &hash),
            ["keys.toml:7:8", "the key in line 3 has this hash already"],
        ),
    ] {
        for (text, is_good) in [(one.clone() + &other, false), (one, true), (other, true)] {
            fs::write(&file, text).unwrap();
            set_mode(&file, 0o600);
            let checked = key(&["check"], &file);
            if is_good { drop(checked.succeeded()) } else { checked.refused(1, &said) }
        }
    }
}

test!(Both, keys_that_others_can_write_or_read_are_refused);
fn keys_that_others_can_write_or_read_are_refused() {
    let (place, file) = place();
    key(&["new", "grader", "--add"], &file).succeeded();
    let before = fs::read_to_string(&file).unwrap();
    let refused = |path: &Path, words: &[&str]| {
        for command in [&["ls"][..], &["check"], &["new", "other", "--add"]] {
            key(command, path).refused(1, words);
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), before);
    };
    for (mode, words) in [
        (0o660, "may be written by others than its owner (mode 0660)"),
        (0o602, "may be written by others than its owner (mode 0602)"),
        (0o644, "has mode 0644, and may have at most 0640"),
        (0o604, "run `chmod 0640 "),
        (0o700, "has mode 0700, and may have at most 0640"),
    ] {
        set_mode(&file, mode);
        refused(&file, &[words, "not trusted"]);
    }
    set_mode(&file, 0o640);
    set_mode(&place.0, 0o775);
    refused(&file, &["may be written by others than its owner (mode 0775)"]);
    set_mode(&place.0, 0o755);
    let link = place.0.join("link.toml");
    symlink(&file, &link).unwrap();
    refused(&link, &["is a symlink"]);
    if is_root() {
        chown(&file, Some(OWNER), None).unwrap();
        refused(&file, &[&format!("belongs to uid {OWNER}, not to root")]);
        chown(&file, Some(0), None).unwrap();
        set_mode(&place.0, 0o1777);
        refused(&file, &["may be written by others than its owner (mode 1777)"]);
        set_mode(&place.0, 0o755);
    }
    // The control.
    for mode in [0o640, 0o600, 0o440] {
        set_mode(&file, mode);
        key(&["check"], &file).succeeded();
    }
    key(&["new", "other", "--add"], &file).succeeded();
}

test!(Both, a_new_key_keeps_owner_group_and_mode_of_the_file);
fn a_new_key_keeps_owner_group_and_mode_of_the_file() {
    let (place, file) = place();
    key(&["new", "first", "--add"], &file).succeeded();
    assert_eq!(mode(&file), 0o600);
    if is_root() {
        chown(&file, None, Some(OWNER)).unwrap();
    }
    set_mode(&file, 0o640);
    let of = |path: &Path| fs::metadata(path).map(|file| (file.uid(), file.gid(), file.mode())).unwrap();
    let (before, inode) = (of(&file), fs::metadata(&file).unwrap().ino());
    let reader = File::open(&file).unwrap();
    key(&["new", "second", "--add"], &file).succeeded();
    assert_eq!(of(&file), before);
    assert_eq!(names(&place.0), ["keys.toml"]);
    // A process that reads the old file meanwhile has it whole.
    assert!(fs::metadata(&file).unwrap().ino() != inode && reader.metadata().unwrap().ino() == inode);
    assert_eq!(std::io::read_to_string(reader).unwrap().matches("[[key]]").count(), 1);
}

test!(Both, commands_at_the_same_time_lose_no_key);
fn commands_at_the_same_time_lose_no_key() {
    let (place, file) = place();
    let start = |number: usize| {
        let id = format!("key-{number}");
        let mut command = stockade(["key", "new", &id, "--add", "--file", text(&file)]);
        command.stdin(Stdio::null()).spawn().unwrap()
    };
    let started: Vec<_> = (0..12).map(start).collect();
    for child in started {
        Said::from(child.wait_with_output().unwrap()).succeeded();
    }
    let checked = key(&["check"], &file).succeeded();
    assert!(checked.stdout.ends_with(": ok (12 keys)\n"), "{}", checked.stdout);
    assert_eq!(names(&place.0), ["keys.toml"]);
}

test!(Both, a_token_that_is_lost_is_told_with_the_line_of_its_key);
fn a_token_that_is_lost_is_told_with_the_line_of_its_key() {
    let (_place, file) = place();
    key(&["new", "first", "--add"], &file).succeeded();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = stockade(["key", "new", "second", "--add", "--file", text(&file)]);
    let said = Said::from(command.stdout(full).output().unwrap());
    said.refused(125, &["the key second was added to ", "keys.toml:7, and its token is lost; remove it there"]);
    assert!(key(&["ls"], &file).succeeded().stdout.contains("second"));
}

test!(RootlessOnly, a_file_that_cannot_be_written_stays_and_no_token_is_shown);
fn a_file_that_cannot_be_written_stays_and_no_token_is_shown() {
    let (place, file) = place();
    key(&["new", "first", "--add"], &file).succeeded();
    let before = fs::read_to_string(&file).unwrap();
    set_mode(&place.0, 0o555);
    key(&["new", "second", "--add"], &file).refused(125, &["Permission denied"]);
    set_mode(&place.0, 0o755);
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    key(&["new", "second", "--add"], &file).succeeded();
}

test!(RootlessOnly, a_users_keys_lie_beside_its_policies);
fn a_users_keys_lie_beside_its_policies() {
    let config = directory().join("config");
    let call = |words: &[&str], variable: (&str, &Path)| -> Said {
        stockade([&["key"], words].concat()).env(variable.0, variable.1).output().unwrap().into()
    };
    call(&["new", "first", "--add"], ("XDG_CONFIG_HOME", &config)).succeeded();
    let file = config.join("stockade/keys.toml");
    assert_eq!((mode(&file), mode(&config.join("stockade"))), (0o600, 0o755));
    call(&["new", "first", "--add"], ("XDG_CONFIG_HOME", &config)).refused(1, &[text(&file)]);
    let home = directory().join("other-home");
    fs::create_dir(&home).unwrap();
    call(&["new", "first", "--add"], ("HOME", &home)).succeeded();
    assert!(home.join(".config/stockade/keys.toml").is_file());
    call(&["new", "first", "--add"], ("HOME", Path::new(""))).refused(125, &["neither XDG_CONFIG_HOME nor HOME", "--file"]);
}

/// Runs a shell script where `/etc` is a copy, with these lines at the end of its groups.
fn under_etc(groups: &str, script: &str, variables: &[(&str, &str)]) -> Said {
    let groups = fs::read_to_string("/etc/group").unwrap() + groups;
    let mut command = command_under_etc(&[("group", &groups)], &["sh", "-c", script]);
    command.envs(variables.iter().copied()).env("STOCKADE", program_path().unwrap());
    command.output().unwrap().into()
}

test!(RootOnly, roots_keys_are_for_the_group_of_the_service);
fn roots_keys_are_for_the_group_of_the_service() {
    let script = "umask 077; set -e; rm -rf /etc/stockade; $STOCKADE key new first --add > /dev/null; $STOCKADE key check; stat -c '%a %u:%g' /etc/stockade/keys.toml";
    for (groups, owner) in [("\nstockade-serve:x:4321:\n", "640 0:4321"), ("", "600 0:0")] {
        let said = under_etc(groups, script, &[]).succeeded();
        assert_eq!(said.stdout, format!("/etc/stockade/keys.toml: ok (1 key)\n{owner}\n"));
    }
}

test!(RootOnly, a_caller_of_sudo_has_no_right_to_roots_keys);
fn a_caller_of_sudo_has_no_right_to_roots_keys() {
    let id = OWNER.to_string();
    let call = |words: &str| {
        let script = format!(
            "set -e; rm -rf /etc/stockade; $STOCKADE key new first --add > /dev/null 2>&1; cp /etc/stockade/keys.toml /tmp/$$; \
             status=0; env SUDO_UID={id} SUDO_GID={id} $STOCKADE key {words} || status=$?; \
             cmp /etc/stockade/keys.toml /tmp/$$ >&2; rm /tmp/$$; exit $status"
        );
        under_etc("", &script, &[])
    };
    for words in ["ls", "check", "new second --add"] {
        call(words).refused(1, &["Permission denied", &format!("you came through sudo as uid {id}")]);
    }
    // The control: a caller of sudo that is root.
    let root =
        under_etc("", "rm -rf /etc/stockade; $STOCKADE key new first --add && $STOCKADE key ls", &[("SUDO_UID", "0"), ("SUDO_GID", "0")]);
    assert!(root.succeeded().stdout.contains("first"));
}
