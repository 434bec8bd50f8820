//! Host paths that a policy shows, and what code may do in the scratch.
//!
//! Globs are compared as text: that one glob matches all that another matches is not seen.

use std::path::{Path, PathBuf};

use stockade_policy::{
    model::{ANY_IMAGE, Access, Filesystem, Policy, Scratch},
    plan::{is_in_image, is_program_directory},
};

use super::{Area, Difference};

/// One path of the host as a policy shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VisiblePath {
    pub path: PathBuf,
    /// Programs may be run from it.
    pub executable: bool,
    /// It may be missing on a host.
    pub optional: bool,
}

/// The paths that a policy shows, in the order in which the plan binds them: what lies
/// below an earlier one is not bound again, and a later one covers what it holds. Where the root is an
/// image's, it has those of the system.
pub(crate) fn visible_paths(policy: &Policy) -> Vec<VisiblePath> {
    let mut out: Vec<VisiblePath> = Vec::new();
    let required = policy.filesystem.read_only.iter().map(|path| (path, is_program_directory(path), false));
    let optional = policy.filesystem.read_only_optional.iter().map(|path| (path, false, true));
    let is_of_host = |path: &Path| policy.filesystem.root.image.is_none() || !is_in_image(path);
    for (path, executable, optional) in required.chain(optional).filter(|(path, ..)| is_of_host(path)) {
        // One that may be missing hides nothing that comes after it.
        if !out.iter().any(|earlier| !earlier.optional && path.starts_with(&earlier.path)) {
            out.push(VisiblePath { path: path.clone(), executable, optional });
        }
    }
    out
}

/// Whether all of a path can be read.
fn readable(visible: &[VisiblePath], path: &Path) -> bool {
    visible.iter().any(|other| path.starts_with(&other.path))
}

/// Whether programs can be run from all of a path, whatever of the optional is on a host.
fn runnable(visible: &[VisiblePath], path: &Path) -> bool {
    let index = visible.iter().position(|other| other.executable && path.starts_with(&other.path));
    // What is bound later above it takes the right away.
    index.is_some_and(|index| {
        !visible.iter().skip(index + 1).any(|later| !later.executable && (path.starts_with(&later.path) || later.path.starts_with(path)))
    })
}

pub(super) fn loosened_paths(ceiling: &Policy, policy: &Policy, out: &mut Vec<Difference>) {
    let (above, here) = (visible_paths(ceiling), visible_paths(policy));
    if above != here {
        let text = |visible: &VisiblePath| visible.path.display().to_string();
        let read: Vec<String> = here.iter().filter(|one| !readable(&above, &one.path)).map(text).collect();
        let run: Vec<String> = here.iter().filter(|one| one.executable && !runnable(&above, &one.path)).map(text).collect();
        if !read.is_empty() {
            let difference = Difference::new(Area::Files, "[filesystem] read_only, read_only_optional", "readable host paths");
            out.push(
                difference.items(read).consequence(
                    "code can read every file there that the run's user on the host may read, and connect to every socket there",
                ),
            );
        }
        if !run.is_empty() {
            let difference = Difference::new(Area::Files, "[filesystem] read_only", "executable host paths");
            out.push(difference.items(run).consequence("code can start any program there"));
        }
    }
    let devices: Vec<String> = policy
        .filesystem
        .devices
        .iter()
        .filter(|device| !ceiling.filesystem.devices.contains(device))
        .map(|name| format!("/dev/{name}"))
        .collect();
    if !devices.is_empty() {
        let tty = devices.iter().any(|device| device == "/dev/tty");
        let difference = Difference::new(Area::Files, "[filesystem] devices", "device nodes").items(devices);
        out.push(difference.consequence(if tty {
            "code can open its own terminal, if it has one, although its streams are redirected"
        } else {
            "code can read and write them; none is a disk or the host's memory"
        }));
    }
    let sockets: Vec<String> =
        policy.filesystem.sockets.iter().filter(|pattern| !ceiling.filesystem.sockets.contains(pattern)).cloned().collect();
    if !sockets.is_empty() {
        let difference = Difference::new(Area::Files, "[filesystem] sockets", "sockets that a caller of `stockade bwrap` may show");
        out.push(difference.items(sockets).consequence("code can speak to the programs of the host that listen there"));
    }
    for (name, runtime) in &policy.runtimes {
        let Some(venv) = &runtime.venv else { continue };
        let same = ceiling.runtimes.get(name).is_some_and(|other| other.venv.as_ref() == Some(venv));
        if !same && !runnable(&above, venv) {
            let difference = Difference::new(
                Area::Files,
                format!("[runtimes.{name}] venv"),
                "readable and executable virtual environment, with the prefix of its base interpreter",
            );
            out.push(difference.items(vec![venv.display().to_string()]).consequence("code can use every package installed there"));
        }
    }
}

/// Images that code may be started from and could not be, and whether it may change them.
pub(super) fn loosened_images(ceiling: &Filesystem, filesystem: &Filesystem, out: &mut Vec<Difference>) {
    let own = |filesystem: &Filesystem| -> Vec<String> { filesystem.images.iter().chain(&filesystem.root.image).cloned().collect() };
    let above = own(ceiling);
    let is_new = |image: &String| !above.contains(image) && !above.iter().any(|image| image == ANY_IMAGE);
    let named: Vec<String> = filesystem.images.iter().filter(|image| is_new(image)).cloned().collect();
    if !named.is_empty() {
        let difference = Difference::new(Area::Files, "[filesystem] images", "images that a request may have as its root").items(named);
        out.push(difference.consequence("code can start every program of them"));
    }
    if let Some(image) = filesystem.root.image.as_ref().filter(|image| is_new(image)) {
        let difference = Difference::new(Area::Files, "[filesystem] root", "the image that is the root").items(vec![image.clone()]);
        out.push(difference.consequence("code can start every program of it"));
    }
    if filesystem.writable_root && !ceiling.writable_root {
        let difference = Difference::new(Area::Files, "[filesystem] writable_root", "the root of an image is writable");
        out.push(difference.consequence("code can change the programs that it starts later in the same run"));
    }
}

pub(super) fn loosened_scratch(ceiling: &Scratch, scratch: &Scratch, out: &mut Vec<Difference>) {
    let mut add = |key: &str, text: &str, items: Vec<String>, consequence: &str| {
        out.push(Difference::new(Area::Scratch, format!("[scratch] {key}"), text).items(items).consequence(consequence));
    };
    if scratch.access == Access::Rw && ceiling.access == Access::Ro {
        add("access", "the scratch is writable", Vec::new(), "code can change and delete everything in it that is not protected");
    }
    if scratch.create && !ceiling.create {
        add("create", "a missing scratch directory is made", Vec::new(), "a misspelt path is made instead of refused");
    }
    if scratch.home && !ceiling.home {
        add(
            "home",
            "HOME is in the scratch",
            Vec::new(),
            "the next run in that scratch reads what this run leaves in HOME, such as start-up files",
        );
    }
    let places: Vec<String> =
        scratch.root.iter().filter(|place| !ceiling.root.contains(place)).map(|place| place.display().to_string()).collect();
    if !places.is_empty() {
        add("root", "root-owned directories may be the scratch", places, "code that root runs can change and delete root's files there");
    }
    let open = |listed: &[String], kept: &[&[String]]| -> Vec<String> {
        listed.iter().filter(|glob| !kept.iter().any(|list| list.contains(glob))).cloned().collect()
    };
    let shown = open(&ceiling.hidden, &[&scratch.hidden]);
    if !shown.is_empty() {
        add("hidden", "not hidden in the scratch", shown, "code can read what no other glob hides");
    }
    let writable = open(&ceiling.read_only, &[&scratch.hidden, &scratch.read_only]);
    if scratch.access == Access::Rw && !writable.is_empty() {
        add("read_only", "not read-only in the scratch", writable, "code can change and delete what no other glob protects");
    }
}
