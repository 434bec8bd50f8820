//! `stockade image`: archives become trees of layers that an overlay can be made of, and hostile ones nothing.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use serde_json::{Value, json};

use crate::support::{
    exec::text,
    images::{Layer, Layout, Tar, digest, docker_save, gzip, image, imported, store, trees, zstd},
    runner::{directory, eventually, is_root, test},
};

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a command of `stockade image` that must succeed; what it printed.
fn done(arguments: &[&str]) -> String {
    let output = image(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    stdout(&output)
}

fn import(path: &Path, options: &[&str]) -> Output {
    let output = imported(path, options);
    assert!(output.status.success(), "{output:?}");
    output
}

/// An import that must fail, and say this; the store has nothing of it.
fn refused(path: &Path, options: &[&str], said: &str) {
    let output = imported(path, options);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{path:?}: {output:?}");
    assert!(error.contains(said), "{path:?}: {error}");
    assert_eq!(stored(), Vec::<String>::new(), "{path:?}");
}

fn refused_layer(tar: &Tar, said: &str) {
    let name = format!("layout-{}", &digest(&tar.bytes())[7..20]);
    refused(&Layout::new(&[Layer::gzip(tar)]).write(&name), &[], said);
}

/// What lies in the store beside its empty parts.
fn stored() -> Vec<String> {
    let parts = ["layers", "flat", "images", "names", "tmp"].iter();
    let entries = parts.flat_map(|part| fs::read_dir(store().join(part)).into_iter().flatten());
    entries.map(|entry| entry.unwrap().path().display().to_string()).collect()
}

fn read(path: PathBuf) -> String {
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn base() -> Tar {
    Tar::new().directory("./").directory("usr/").directory("usr/bin/").file("usr/bin/sh", "shell").symlink("bin", "usr/bin")
}

test!(Both, a_layout_becomes_an_image_that_is_listed_verified_and_removed);
fn a_layout_becomes_an_image_that_is_listed_verified_and_removed() {
    assert!(!done(&["ls"]).contains("sha256"));
    let layers = [Layer::gzip(&base()), Layer::zstd(&Tar::new().file("zstd", "z")), Layer::plain(&Tar::new().file("plain", "p"))];
    let layout = Layout::new(&layers);
    let path = layout.write("layout");
    assert_eq!(stdout(&import(&path, &["--name", "base:1"])), format!("base:1@{}\n", layout.digest()));
    import(&path, &["--name", "base:2"]);
    let listed: Value = serde_json::from_str(&done(&["ls", "--json"])).unwrap();
    let image = &listed[0];
    assert_eq!((&image["names"], &image["env"], &image["cmd"]), (&json!(["base:1", "base:2"]), &json!(["A=1"]), &json!(["sh"])));
    assert_eq!((&image["user"], &image["working_dir"], &image["size_bytes"]), (&json!("1000"), &json!("/w"), &json!(7)));
    let trees = trees("base:1");
    assert_eq!([read(trees[0].join("usr/bin/sh")), read(trees[1].join("zstd")), read(trees[2].join("plain"))], ["shell", "z", "p"]);
    done(&["verify"]);
    // A changed file is found, and it alone.
    fs::write(trees[1].join("zstd"), "Z").unwrap();
    let output = image_output(&["verify", "base:1"]);
    assert!(output.status.code() == Some(125) && String::from_utf8_lossy(&output.stderr).contains("has the digest"), "{output:?}");
    fs::write(trees[1].join("zstd"), "z").unwrap();
    done(&["verify", "base:1"]);
    // The image goes with its last name, and its layers with it.
    done(&["rm", "base:1"]);
    assert!(done(&["ls"]).contains("base:2") && trees[0].exists());
    done(&["rm", "base:2"]);
    assert_eq!(stored(), Vec::<String>::new());
}

test!(Both, verify_finds_rights_and_attributes_that_were_changed);
fn verify_finds_rights_and_attributes_that_were_changed() {
    let upper = Tar::new().directory("hides/").file("hides/.wh..wh..opq", "").directory("usr/").file("usr/x", "x");
    import(&Layout::new(&[Layer::gzip(&base().directory("hides/")), Layer::gzip(&upper)]).write("one"), &["--name", "one"]);
    let trees = trees("one");
    let (program, root, hides) = (trees[0].join("usr/bin/sh"), &trees[0], trees[1].join("hides"));
    let mark = |at: &Path, name: &str, value: &[u8]| rustix::fs::setxattr(at, name, value, rustix::fs::XattrFlags::empty()).unwrap();
    let unmark = |at: &Path, name: &str| rustix::fs::removexattr(at, name).unwrap();
    let mode = |mode: u32| fs::set_permissions(root, Permissions::from_mode(mode)).unwrap();
    let own = fs::metadata(root).unwrap().uid();
    let owner = |uid: u32| chown(root, Some(uid), None).unwrap();
    let is_found = |what: &str| {
        let output = image_output(&["verify", "one"]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(125) && error.contains("has the digest"), "{what}: {output:?}");
    };
    let is_whole = || assert!(done(&["verify", "one"]).contains("as it was imported"));
    is_whole();
    mark(&program, "user.overlay.metacopy", b"");
    is_found("metacopy of a file");
    unmark(&program, "user.overlay.metacopy");
    is_whole();
    mark(&hides, "user.overlay.opaque", b"x");
    is_found("another mark of an opaque directory");
    mark(&hides, "user.overlay.opaque", b"y");
    is_whole();
    mark(root, "user.overlay.redirect", b"/etc");
    is_found("redirect of the root");
    unmark(root, "user.overlay.redirect");
    mode(0o777);
    is_found("mode of the root");
    mode(0o755);
    is_whole();
    if is_root() {
        owner(own + 1000);
        is_found("owner of the root");
        owner(own);
        is_whole();
    }
}

test!(Both, what_verify_finds_names_every_image_that_must_go_before_it_is_imported_again);
fn what_verify_finds_names_every_image_that_must_go_before_it_is_imported_again() {
    let hidden = "\u{9b}31m\u{202e}";
    let shared = Layer::gzip(&base());
    let layouts = ["a", "b"].map(|name| {
        let layers = [shared.clone(), Layer::plain(&Tar::new().file(name, "x"))];
        let diff_ids = layers.clone().map(|layer| digest(&layer.archive));
        let layout = Layout::with(&layers, &diff_ids, "linux/amd64", json!({"Env": [format!("A={hidden}")], "Cmd": ["sh"]}));
        (layout.write(name), layout.digest(), name)
    });
    let import_all = || layouts.iter().for_each(|(path, _, name)| drop(import(path, &["--name", name])));
    import_all();
    // What a configuration says is shown without the characters that a terminal obeys.
    let shown = done(&["inspect", "a"]);
    let known: Value = serde_json::from_str(&shown).unwrap();
    assert!(!shown.contains(['\u{9b}', '\u{202e}']) && known["env"][0] == json!(format!("A={hidden}")), "{shown}");
    let file = trees("a")[0].join("usr/bin/sh");
    fs::write(&file, "changed").unwrap();
    // One of two images that have the layer is not enough.
    done(&["rm", "a"]);
    import(&layouts[0].0, &["--name", "a"]);
    let output = image_output(&["verify", "a"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(125) && layouts.iter().all(|(_, digest, _)| error.contains(digest)), "{error}");
    done(&["rm", &layouts[0].1, &layouts[1].1]);
    import_all();
    assert_eq!(read(file), "shell");
    done(&["verify"]);
    // A layer whose tree is gone is not taken for one that is there.
    fs::remove_dir_all(&trees("a")[0]).unwrap();
    done(&["rm", "a"]);
    let output = imported(&layouts[0].0, &["--name", "a"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(125) && error.contains("is missing") && error.contains(&layouts[1].1), "{error}");
}

fn image_output(arguments: &[&str]) -> Output {
    image(arguments).output().unwrap()
}

test!(Both, every_kind_of_archive_gives_the_same_layers);
fn every_kind_of_archive_gives_the_same_layers() {
    let layers = [Layer::gzip(&base()), Layer::gzip(&Tar::new().file("a", "1"))];
    let layout = Layout::new(&layers);
    import(&layout.write("layout"), &["--name", "layout"]);
    let archive = layout.archive();
    // Docker from 25 on writes a layout with a manifest.json beside it.
    let both = [&archive[..archive.len() - 1024], &Tar::new().file("manifest.json", "[]").bytes()].concat();
    let kinds = [
        ("tar", archive.clone()),
        ("gz", gzip(&archive)),
        ("zst", zstd(&archive)),
        ("docker", docker_save(&layers, "docker:1")),
        ("new", both),
    ];
    for (kind, bytes) in kinds {
        let file = directory().join(kind);
        fs::write(&file, bytes).unwrap();
        let name = if kind == "docker" { "docker:1" } else { kind };
        let options: &[&str] = if kind == "docker" { &[] } else { &["--name", kind] };
        assert!(stdout(&import(&file, options)).starts_with(&format!("{name}@sha256:")));
        assert_eq!(trees(name), trees("layout"), "{kind}");
    }
    // The name of the archive itself, with the tag that is meant where none is said.
    import(&directory().join("tar"), &[]);
    assert!(done(&["ls"]).contains("test  "));
    assert_eq!(trees("docker:1").len(), 2);
}

test!(Both, names_that_lead_out_are_refused_and_an_ordinary_tar_would_follow_them);
fn names_that_lead_out_are_refused_and_an_ordinary_tar_would_follow_them() {
    let outside = directory().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::set_permissions(&outside, fs::Permissions::from_mode(0o777)).unwrap();
    let written = outside.join("f");
    let absolute = text(&written);
    let refusals = [
        (Tar::new().file(absolute, "x"), "its name is absolute"),
        (Tar::new().file("../../outside/f", "x"), "its name has `..`"),
        (Tar::new().directory("a/").file("a/../../../outside/f", "x"), "its name has `..`"),
        (Tar::new().file("x", "x").pax("path", "../../outside/f").file("y", "x"), "its name has `..`"),
    ];
    for (tar, said) in &refusals {
        refused_layer(tar, said);
        assert!(!written.exists());
        extract_with_tar(tar);
        assert!(fs::remove_file(&written).is_ok(), "the control: tar writes outside");
    }
    for (name, said) in [(".wh...", "a whiteout of no file"), ("d/.wh..", "a whiteout of no file"), (".wh.", "a whiteout of no file")] {
        refused_layer(&Tar::new().directory("d/").file(name, ""), said);
    }
}

/// What a tar that trusts an archive makes of it, two directories below the test's own.
fn extract_with_tar(tar: &Tar) {
    let (into, file) = (directory().join("t/t"), directory().join("t.tar"));
    fs::remove_dir_all(&into).unwrap_or_default();
    fs::create_dir_all(&into).unwrap();
    fs::write(&file, tar.bytes()).unwrap();
    let status = Command::new("tar").args(["-xPf", text(&file), "-C", text(&into)]).stderr(Stdio::null()).status();
    assert!(status.is_ok());
}

test!(Both, links_are_followed_inside_the_image_and_never_outside);
fn links_are_followed_inside_the_image_and_never_outside() {
    let outside = directory().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "of the host").unwrap();
    let tar = Tar::new().symlink("out", text(&outside)).symlink("up", "../../../../..").file("out/f", "x").file("up/g", "y");
    import(&Layout::new(&[Layer::gzip(&tar)]).write("one"), &["--name", "one"]);
    let tree = &trees("one")[0];
    assert!(!outside.join("f").exists());
    assert_eq!(read(tree.join(text(&outside).trim_start_matches('/')).join("f")), "x");
    assert_eq!(read(tree.join("g")), "y");
    extract_with_tar(&tar);
    assert!(outside.join("f").exists(), "the control: tar follows the link");
    // A hard link to a file of the host is one to a file of the image, which has none.
    done(&["rm", "one"]);
    refused_layer(&Tar::new().symlink("out", text(&outside)).hard_link("stolen", "out/secret"), "which is no file of this layer");
    refused_layer(&Tar::new().symlink("a", "b").symlink("b", "a").file("a/f", "x"), "more than 40 symbolic links");
    refused_layer(&Tar::new().file("a", "x").file("a/f", "x"), "its directory is a file");
    // A name that asks for a mark is no directory, by no way.
    refused_layer(&Tar::new().file("a/.wh..wh..opq/f", "x"), "a whiteout of no file");
    refused_layer(&Tar::new().directory("a/").symlink("l", "a/.wh..wh..opq").file("l/f", "x"), "a whiteout of no file");
}

test!(Both, a_layer_is_unpacked_as_on_top_of_those_below);
fn a_layer_is_unpacked_as_on_top_of_those_below() {
    let upper = Tar::new()
        .file("bin/foo", "foo")
        .hard_link("usr/sh2", "bin/sh")
        .file("usr/.wh.gone", "")
        .directory("opaque/")
        .file("opaque/.wh..wh..opq", "")
        .file("opaque/.wh..wh..opq", "");
    let lower = base().file("usr/gone", "x").directory("opaque/").file("opaque/x", "x");
    import(&Layout::new(&[Layer::gzip(&lower), Layer::gzip(&upper)]).write("one"), &["--name", "one"]);
    let one = trees("one");
    // `bin` is a link below, and so the program lies behind it; an own directory `bin` would hide `/bin/sh`.
    assert_eq!(read(one[1].join("usr/bin/foo")), "foo");
    assert!(!one[1].join("bin").exists() && !one[1].join("opaque/x").exists());
    assert_eq!(read(one[1].join("usr/sh2")), "shell");
    let gone = fs::symlink_metadata(one[1].join("usr/gone")).unwrap();
    assert!(gone.file_type().is_char_device() && gone.rdev() == 0);
    let mut mark = [0; 4];
    let length = rustix::fs::getxattr(one[1].join("opaque"), "user.overlay.opaque", &mut mark).unwrap();
    assert_eq!(&mark[..length], b"y");
    assert_eq!(fs::read_dir(one[1].join("opaque")).unwrap().count(), 0, "what asked for the mark is gone");
    // What the layer hides it cannot link to, and the same without the whiteout is a copy.
    let linked = Tar::new().directory("opaque/").hard_link("y", "opaque/x");
    let layout = |tar: &Tar| Layout::new(&[Layer::gzip(&lower), Layer::gzip(tar)]);
    let hides = Tar::new().file("opaque/.wh..wh..opq", "").hard_link("y", "opaque/x");
    let output = imported(&layout(&hides).write("hides"), &["--name", "hides"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("no file of this layer or of one below"), "{output:?}");
    import(&layout(&linked).write("linked"), &["--name", "linked"]);
    // On another layer the same archive is another tree; a layer that only adds is one for all.
    let other = Layer::gzip(&Tar::new().directory("bin/").file("bin/sh", "other"));
    let adds = Layer::gzip(&Tar::new().directory("added/").file("added/f", "x"));
    import(&Layout::new(&[other, Layer::gzip(&upper.clone().file("usr/.wh.none", "")), adds.clone()]).write("other"), &["--name", "other"]);
    import(&Layout::new(&[Layer::gzip(&lower), adds]).write("two"), &["--name", "two"]);
    let (other, two) = (trees("other"), trees("two"));
    assert_eq!(read(other[1].join("bin/foo")), "foo");
    assert_eq!((&two[0], &two[1]), (&one[0], &other[2]));
}

test!(Both, what_replaces_what_within_a_layer_is_as_with_docker);
fn what_replaces_what_within_a_layer_is_as_with_docker() {
    let long = format!("{}/{}", "d".repeat(150), "f".repeat(200));
    let upper = Tar::new()
        .directory("a/")
        .file("a/x", "1")
        .file("a", "file now")
        .file("b", "1")
        .directory("b/")
        .file("b/x", "2")
        .file("twice", "1")
        .file("twice", "2")
        .file(".wh.same", "")
        .file("same", "stays")
        .file("later", "stays")
        .file(".wh.later", "")
        .pax("path", &long)
        .file("short", "pax")
        .entry("././@LongLink", b'L', "", 0, 0, format!("{}\0", "g".repeat(120)).as_bytes())
        .file("short", "gnu");
    import(&Layout::new(&[Layer::gzip(&base()), Layer::gzip(&upper)]).write("one"), &["--name", "one"]);
    let tree = &trees("one")[1];
    let found = ["a", "b/x", "twice", "same", "later", &long, &"g".repeat(120)].map(|name| read(tree.join(name)));
    assert_eq!(found, ["file now", "2", "2", "stays", "stays", "pax", "gnu"]);
    assert_eq!(fs::metadata(tree.join("twice")).unwrap().mtime(), 1_600_000_000);
}

test!(Both, rights_devices_and_owners_are_dropped_and_counted);
fn rights_devices_and_owners_are_dropped_and_counted() {
    let tar = Tar::new()
        .entry("su", b'0', "", 0o6755, 0, b"x")
        .hard_link("su2", "su")
        .entry("null", b'3', "", 0o666, 0, b"")
        .entry("disk", b'4', "", 0o666, 0, b"")
        .entry("fifo", b'6', "", 0o666, 0, b"")
        .entry("theirs", b'0', "", 0o600, 1000, b"x")
        .pax("SCHILY.xattr.security.capability", "x")
        .file("capable", "x");
    let output = import(&Layout::new(&[Layer::gzip(&tar)]).write("one"), &["--name", "one"]);
    let said = String::from_utf8_lossy(&output.stderr);
    for lost in ["1 set-ID", "2 devices", "1 fifos", "1 extended", "1 owners"] {
        assert!(said.contains(lost), "{said}");
    }
    let tree = &trees("one")[0];
    let (su, theirs) = (fs::metadata(tree.join("su")).unwrap(), fs::metadata(tree.join("theirs")).unwrap());
    assert_eq!((su.mode(), su.nlink(), theirs.mode(), theirs.uid()), (0o100_755, 2, 0o100_644, rustix::process::geteuid().as_raw()));
    assert!(!["null", "disk", "fifo"].iter().any(|name| tree.join(name).exists()) && tree.join("capable").exists());
}

test!(Both, bytes_that_are_not_those_promised_are_refused);
fn bytes_that_are_not_those_promised_are_refused() {
    let layers = [Layer::gzip(&base()), Layer::zstd(&Tar::new().file("f", &"x".repeat(5000)))];
    let good = Layout::new(&layers);
    let write = |name: &str, layout: &Layout| layout.write(name);
    let changed = |at: usize, change: &dyn Fn(&mut Vec<u8>)| {
        let mut layout = good.clone();
        change(&mut layout.blobs[at].1);
        layout
    };
    let other = |bytes: &mut Vec<u8>| *bytes = gzip(&base().file("evil", "x").bytes());
    refused(&write("size", &changed(0, &other)), &[], "are promised");
    let same_size = |bytes: &mut Vec<u8>| *bytes.last_mut().unwrap() ^= 1;
    refused(&write("digest", &changed(1, &same_size)), &[], "has the digest");
    refused(&write("cut", &changed(1, &|bytes| bytes.truncate(20))), &[], "has 20 bytes");
    refused(&write("manifest", &changed(3, &|bytes| bytes.push(b' '))), &[], "are promised");
    let diff_ids = [digest(&layers[0].archive), digest(b"other")];
    let lies = Layout::with(&layers, &diff_ids, "linux/amd64", json!({}));
    refused(&write("diff-id", &lies), &[], "the uncompressed archive of the blob");
    let cut = Layer { blob: gzip(&base().bytes())[..60].to_vec(), archive: base().bytes() };
    refused(&write("gzip", &Layout::new(&[cut])), &[], "decompress layer");
    let mut missing = good.clone();
    missing.blobs.remove(1);
    refused(&write("missing", &missing), &[], "is missing from the image");
    // The control: the same without a change.
    import(&write("good", &good), &[]);
}

test!(Both, manifests_that_name_files_of_the_host_or_another_machine_are_refused);
fn manifests_that_name_files_of_the_host_or_another_machine_are_refused() {
    let layers = [Layer::gzip(&base())];
    let good = Layout::new(&layers);
    let with_index = |name: &str, change: &dyn Fn(&mut Value)| {
        let mut layout = good.clone();
        change(&mut layout.index);
        layout.write(name)
    };
    let outside = |index: &mut Value| index["manifests"][0]["digest"] = json!("sha256:../../../../../etc/passwd");
    refused(&with_index("outside", &outside), &[], "is no digest");
    let arm = Layout::with(&layers, &[digest(&layers[0].archive)], "linux/arm64", json!({}));
    refused(&arm.write("arm"), &[], "there is no image for linux/amd64; there are linux/arm64");
    refused(&with_index("unnamed", &|index| index["manifests"][0]["annotations"] = json!({})), &[], "give it one with --name");
    refused(&with_index("named", &|_| ()), &["--name", "a@b"], "cannot name an image");
    // A blob that is a link to a file of the host is not followed.
    let linked = good.write("linked");
    let blob = linked.join(format!("blobs/{}", good.blobs[0].0.replace(':', "/")));
    fs::rename(&blob, directory().join("elsewhere")).unwrap();
    std::os::unix::fs::symlink(directory().join("elsewhere"), &blob).unwrap();
    refused(&linked, &[], "symbolic links");
    fs::write(directory().join("nothing"), Tar::new().file("x", "y").bytes()).unwrap();
    refused(&directory().join("nothing"), &[], "neither index.json nor manifest.json");
    fs::write(directory().join("rubbish"), "rubbish").unwrap();
    refused(&directory().join("rubbish"), &[], "it is cut off");
    // No process writes to it.
    let fifo = directory().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    refused(&fifo, &[], "is neither a directory nor a file");
    for long in [Tar::new().pax("path", &"n/".repeat(2049)).file("x", ""), Tar::new().pax("linkpath", &"n".repeat(4097)).hard_link("x", "")]
    {
        fs::write(directory().join("long"), long.bytes()).unwrap();
        refused(&directory().join("long"), &[], "more than 4096 bytes");
    }
    // The control: both platforms in one index, and each is found.
    let mut both = good.clone();
    both.blobs.extend(arm.blobs.clone());
    both.index["manifests"].as_array_mut().unwrap().push(arm.index["manifests"][0].clone());
    let both = both.write("both");
    assert!(stdout(&import(&both, &["--name", "amd"])).ends_with(&format!("{}\n", good.digest())));
    assert!(stdout(&import(&both, &["--name", "arm", "--platform", "linux/arm64"])).ends_with(&format!("{}\n", arm.digest())));
}

test!(Both, an_image_beyond_its_limits_is_refused);
fn an_image_beyond_its_limits_is_refused() {
    let zeros = Tar::new().file("zeros", &"\0".repeat(4 << 20));
    for (name, layer) in [("gzip", Layer::gzip(&zeros)), ("zstd", Layer::zstd(&zeros)), ("plain", Layer::plain(&zeros))] {
        refused(&Layout::new(&[layer]).write(name), &["--max-size", "1m"], "has more than 1048576 bytes");
    }
    let copies = (0..5).fold(Tar::new(), |tar, number| tar.hard_link(&format!("copy{number}"), "f"));
    let lower = Layer::gzip(&Tar::new().file("f", &"x".repeat(300 << 10)));
    let amplified = Layout::new(&[lower, Layer::gzip(&copies)]).write("copies");
    refused(&amplified, &["--max-size", "1m"], "with it the image has more than");
    let deep = Tar::new().pax("path", &"d/".repeat(200)).directory("x");
    refused_layer(&deep, "below more than 128 directories");
    refused_layer(&Tar::new().pax("path", &"n".repeat(256)).file("x", ""), "more than 255 bytes");
    refused_layer(&Tar::new().pax("path", &"p/p".repeat(2000)).file("x", ""), "more than 3840");
    refused_layer(&Tar::new().entry("sparse", b'S', "", 0o644, 0, b""), "a sparse file");
    refused_layer(&Tar::new().pax("GNU.sparse.major", "1").file("sparse", ""), "a sparse file");
    let layers = (0..129).map(|number| Layer::plain(&Tar::new().file(&format!("f{number}"), ""))).collect::<Vec<_>>();
    refused(&Layout::new(&layers).write("many"), &[], "the image has 129 layers");
    // The control: under the usual limit.
    import(&amplified, &[]);
}

test!(Both, many_layers_become_one_tree_as_an_overlay_shows_them);
fn many_layers_become_one_tree_as_an_overlay_shows_them() {
    let mut layers = vec![Layer::plain(&base().directory("d/").file("d/below", "x").file("gone", "x"))];
    layers.extend((0..12).map(|number| Layer::plain(&Tar::new().directory("d/").file(&format!("d/f{number}"), "x"))));
    layers.push(Layer::plain(&Tar::new().file(".wh.gone", "").directory("d/").file("d/.wh.f3", "").file("bin/foo", "foo")));
    // The same layer twice, as an empty one often is.
    layers.push(layers[1].clone());
    import(&Layout::new(&layers).write("many"), &["--name", "many"]);
    let known: Value = serde_json::from_str(&done(&["inspect", "many"])).unwrap();
    let root = store().join("flat").join(&known["flat"]["chain_id"].as_str().unwrap()[7..]).join("root");
    let names = |path: PathBuf| crate::support::leftovers::names(&path).into_iter().collect::<Vec<_>>();
    assert_eq!(names(root.clone()), ["bin", "d", "usr"]);
    assert_eq!(names(root.join("d")).len(), 12, "below and eleven of twelve");
    assert_eq!(names(root.join("usr/bin")), ["foo", "sh"]);
    // Its files take no room of their own.
    assert_eq!(fs::metadata(root.join("usr/bin/sh")).unwrap().nlink(), 2);
    done(&["verify", "many"]);
    done(&["rm", "many"]);
    assert_eq!(stored(), Vec::<String>::new());
}

test!(Both, what_a_crash_leaves_goes_and_what_is_held_stays);
fn what_a_crash_leaves_goes_and_what_is_held_stays() {
    let path = Layout::new(&[Layer::gzip(&base())]).write("one");
    import(&path, &["--name", "one"]);
    let (crashed, alive) = (store().join("tmp/1-1"), store().join("tmp/2-2"));
    fs::create_dir_all(crashed.join("0/root/usr")).unwrap();
    fs::create_dir_all(&alive).unwrap();
    let other = File::open(&alive).unwrap();
    other.lock().unwrap();
    // A run holds its image so.
    let held = File::open(store().join("lock")).unwrap();
    held.lock_shared().unwrap();
    import(&Layout::new(&[Layer::gzip(&Tar::new().file("f", "x"))]).write("two"), &["--name", "two"]);
    assert!(!crashed.exists() && alive.exists());
    let tree = &trees("one")[0];
    let output = image_output(&["rm", "one"]);
    assert!(output.status.success() && String::from_utf8_lossy(&output.stderr).contains("layers stay"), "{output:?}");
    assert!(tree.exists() && image_output(&["gc"]).status.code() == Some(125));
    drop((held, other));
    done(&["gc"]);
    assert!(!tree.exists() && !alive.exists() && trees("two")[0].exists());
}

test!(Both, who_reads_a_layer_has_given_up_its_rights);
fn who_reads_a_layer_has_given_up_its_rights() {
    let program = crate::support::exec::program_path().unwrap().with_file_name("stockade-image");
    let tree = directory().join("s/tree");
    fs::create_dir_all(&tree).unwrap();
    let own = std::process::id().to_string();
    let unpack = ["--unpack", text(tree.parent().unwrap()), "tree", "1000", "1000", "70", &own];
    for words in [&unpack[..], &["--decompress", "70", &own]] {
        let mut child =
            Command::new(&program).args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let status = || fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = |status: &str, name: &str| {
            status.lines().find(|line| line.starts_with(name)).map(|line| line.split_whitespace().nth(1).unwrap_or_default().to_owned())
        };
        assert!(eventually(Duration::from_secs(10), || line(&status(), "Seccomp:").as_deref() == Some("2")), "it reads behind a filter");
        let status = status();
        let found = ["CapEff:", "CapPrm:", "NoNewPrivs:"].map(|name| line(&status, name).unwrap_or_default());
        assert_eq!(found, ["0000000000000000", "0000000000000000", "1"]);
        let limits = fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
        let cpu = limits.lines().find(|line| line.starts_with("Max cpu time")).unwrap();
        assert_eq!(cpu.split_whitespace().collect::<Vec<_>>()[3..], ["70", "70", "seconds"], "what the import has left");
        child.kill().unwrap();
        child.wait().unwrap();
    }
    // Only as a child of the process that it is told.
    let orphan = Command::new(&program).args(["--decompress", "70", "1"]).stdin(Stdio::null()).output().unwrap();
    assert!(String::from_utf8_lossy(&orphan.stderr).contains("could not tie its life"), "{orphan:?}");
}

test!(Both, ten_gigabytes_of_zeros_and_a_million_files_end_at_their_limits, needs [Long], seconds 900);
fn ten_gigabytes_of_zeros_and_a_million_files_end_at_their_limits() {
    // A thousand copies of one member of 10 MiB: gzip and zstd take streams one after the other.
    let zeros = vec![0; 10 << 20];
    for (name, member) in [("gzip", gzip(&zeros)), ("zstd", zstd(&zeros))] {
        let header = Tar::new().entry("zeros", b'0', "", 0o644, 0, b"").bytes()[..512].to_vec();
        let first = if name == "gzip" { gzip(&header) } else { zstd(&header) };
        let blob = [first, member.repeat(1000)].concat();
        let layer = Layer { blob, archive: Vec::new() };
        refused(&Layout::new(&[layer]).write(name), &["--max-size", "1g"], "when it is uncompressed");
    }
    // Member by member, as the archive itself has half a gigabyte.
    let entries = |from: u32| (from..from + 10_000).fold(Tar::new(), |tar, number| tar.file(&format!("d{from}/{number}"), ""));
    let members = (0..=100).map(|part| entries(part * 10_000).bytes()).map(|bytes| gzip(&bytes[..bytes.len() - 1024]));
    let layer = Layer { blob: members.collect::<Vec<_>>().concat(), archive: Vec::new() };
    refused(&Layout::new(&[layer]).write("many"), &[], "more than 1000000 files");
}

test!(Both, an_image_of_umoci_and_of_skopeo_is_the_tree_that_umoci_unpacks, needs [Long, Program("umoci"), Program("skopeo")], seconds 300);
fn an_image_of_umoci_and_of_skopeo_is_the_tree_that_umoci_unpacks() {
    let at = directory();
    let script = r#"set -e
        umoci init --layout l && umoci new --image l:t && umoci unpack --rootless --image l:t b
        mkdir -p b/rootfs/usr/bin b/rootfs/d && ln -s usr/bin b/rootfs/bin && echo sh >b/rootfs/usr/bin/sh && echo x >b/rootfs/d/x
        umoci repack --image l:t b && rm -rf b && umoci unpack --rootless --image l:t b
        rm b/rootfs/d/x && echo foo >b/rootfs/usr/bin/foo && ln b/rootfs/usr/bin/sh b/rootfs/usr/bin/sh2
        umoci repack --image l:t b && rm -rf b && umoci unpack --rootless --image l:t b
        skopeo --insecure-policy copy oci:l:t docker-archive:d.tar:t:1
        skopeo --insecure-policy copy oci:l:t oci-archive:o.tar:t:2"#;
    let output = Command::new("sh").args(["-c", script]).current_dir(&at).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    import(&at.join("l"), &["--name", "l"]);
    import(&at.join("d.tar"), &["--name", "d"]);
    import(&at.join("o.tar"), &["--name", "o"]);
    assert!(trees("l") == trees("d") && trees("l") == trees("o"));
    let upper = &trees("l")[1];
    for name in ["usr/bin/foo", "usr/bin/sh2"] {
        assert_eq!(read(upper.join(name)), read(at.join("b/rootfs").join(name)));
    }
    assert!(fs::symlink_metadata(upper.join("d/x")).unwrap().file_type().is_char_device() && !at.join("b/rootfs/d/x").exists());
}
