//! What a policy keeps from the code in a scratch: the whole of it, or files that its globs name.
//!
//! Each control is the same act in a sandbox of the same policy, in which only that is lifted.

use nix::libc::{EACCES, EBUSY, EROFS};
use stockade_policy::model::Access;
use stockade_protocol::probe::Script;

use super::super::{
    Act, CHANGE_MODE, CHANGE_TIMES, CREATE, MAKE_DIRECTORY, MAKE_LINK, O_CREAT, O_WRONLY, REMOVE, RENAME, TRUNCATE, WRITE, on, seek,
};
use crate::{
    attack::{Attack, Class, Control, ControlExpectation, ControlHost, Expected},
    fixture::{Fixture, scratch_victim},
    script::{CWD, n},
};

const CLASS: Class = Class::FileSystem;
const LAYERS: &[&str] = &["mounts", "landlock"];
const RULES: &[&str] = &["scratch rules"];

pub(super) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let mut all = match fixture.policy.scratch.access {
        Access::Ro => read_only_scratch(),
        Access::Rw => read_only_files(fixture),
    };
    all.extend(hidden_files(fixture));
    all
}

/// `[scratch] access = "ro"`: nothing is made in a scratch, and nothing that lies there changes.
fn read_only_scratch() -> Vec<Attack> {
    let make = [("create a file", CREATE), ("make a directory", MAKE_DIRECTORY), ("make a symbolic link", MAKE_LINK)];
    let change = [
        ("write to", WRITE),
        ("truncate", TRUNCATE),
        ("change the mode of", CHANGE_MODE),
        ("change the times of", CHANGE_TIMES),
        ("rename", RENAME),
        ("remove", REMOVE),
    ];
    let of = |what: &str, place: &str, act: Script| {
        Attack::new(
            CLASS,
            format!("{what} in {place}"),
            format!("{what} in {place}, which the policy keeps read-only"),
            LAYERS,
            act,
            Expected::Errno(&[EROFS, EACCES]),
            Control::Writable(ControlExpectation::Succeeds),
        )
    };
    let mut all = Vec::new();
    for (index, (what, act)) in make.into_iter().enumerate() {
        let name = format!("made-{index}");
        all.push(of(what, "a private scratch", on(&name, act)));
        all.push(of(what, "a host scratch", on(&name, act)).in_host_scratch());
    }
    for (index, (what, act)) in change.into_iter().enumerate() {
        all.push(of(&format!("{what} a file"), "a host scratch", on(&scratch_victim(index), act)).in_host_scratch());
    }
    all
}

/// Globs of `[scratch] read_only`, in a scratch that is writable beside them. Removing comes last:
/// the control has one file for all of these.
fn read_only_files(fixture: &Fixture) -> Vec<Attack> {
    let replace: Act = |b, path| {
        let new = format!("{path}-new");
        b.open(&new, O_WRONLY | O_CREAT);
        let (from, to) = (b.text(&new), b.text(path));
        b.attack("renameat2", &[CWD, from, CWD, to, n(0)]);
    };
    let acts = [("write to", WRITE), ("truncate", TRUNCATE), ("replace", replace), ("remove", REMOVE)];
    let all = fixture.read_only.iter().flat_map(|file| {
        acts.map(|(what, act)| {
            Attack::new(
                CLASS,
                format!("{what} a read-only file, {}", file.glob),
                format!("{what} the scratch's {}, which the policy keeps read-only by {}", file.name, file.glob),
                RULES,
                on(&file.name, act),
                Expected::Errno(&[EROFS, EACCES, EBUSY]),
                Control::Writable(ControlExpectation::Succeeds),
            )
            .in_host_scratch()
        })
    });
    all.collect()
}

/// Globs of `[scratch] hidden` but the one of the shipped policies, which has its own attacks.
fn hidden_files(fixture: &Fixture) -> Vec<Attack> {
    let scratch = fixture.scratch.to_string_lossy();
    let own = fixture.hidden.iter().filter(|file| file.glob != ".env*");
    own.map(|file| {
        Attack::new(
            CLASS,
            format!("a hidden file, {}", file.glob),
            format!("read the scratch's {}, which the policy hides by {}", file.name, file.glob),
            RULES,
            seek(&file.name, &fixture.secret),
            Expected::Errno(&[EACCES]),
            Control::OutsideInstead(
                ControlHost::Host,
                seek(&format!("{scratch}/{}", file.name), &fixture.secret),
                ControlExpectation::Finds,
            ),
        )
        .in_host_scratch()
    })
    .collect()
}
