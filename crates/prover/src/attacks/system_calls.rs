//! Every system call that the policy does not allow, by number, with arguments of which
//! no kernel makes anything.
//!
//! These are many and alike: the summary counts them apart.

use nix::libc::{EINVAL, ENOSYS, EOPNOTSUPP, EPERM};
use stockade_policy::filter::{Action, names};
use stockade_protocol::probe::Script;

use crate::{
    attack::{Act, Attack, Class, Control, ControlExpectation, ControlHost, Expected},
    fixture::Fixture,
    script::{n, script},
};

const CLASS: Class = Class::SystemCalls;
const FILTER: &[&str] = &["seccomp"];
/// How many numbers beyond the last known one are tried.
const BEYOND: u32 = 24;

pub(crate) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let unknown = names::first_unknown();
    let mut all = Vec::new();
    let mut allowed = 0;
    for number in 0..unknown + BEYOND {
        let name = names::name(number);
        let expected = match (&name, name.as_deref().and_then(|name| fixture.rules.action(name))) {
            (Some(_), Some(Action::Allow | Action::Check(_))) => {
                allowed += 1;
                continue;
            }
            (Some(_), Some(Action::Deny)) => Expected::Errno(&[EPERM]),
            (Some(_), Some(Action::Unsupported(errno))) => Expected::Errno(if errno == 22 { &[EINVAL] } else { &[EOPNOTSUPP] }),
            (None, _) if number < unknown => continue,
            _ => Expected::Errno(&[ENOSYS]),
        };
        let act = call(number);
        let shown = name.clone().unwrap_or_else(|| format!("number {number}"));
        let tried = format!("call {shown} ({number}) with arguments of which the kernel makes nothing");
        if fixture.plan.filter.kill.contains(&number) {
            let act = Act::Kill { script: act, name: shown.clone() };
            all.push(Attack {
                class: CLASS,
                name: shown,
                tried,
                layers: FILTER,
                act,
                in_host_scratch: false,
                concurrent: false,
                reported_as: None,
            });
            continue;
        }
        let control = Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Reaches);
        let mut attack = Attack::new(CLASS, shown.clone(), tried, FILTER, act, expected, control);
        attack.reported_as = name;
        all.push(attack);
    }
    all.push(Attack::allowed(
        CLASS,
        format!("{allowed} calls"),
        format!("{allowed} calls that the policy lists, some of them with rules on their arguments"),
        "[seccomp] allow",
    ));
    all
}

/// -1 everywhere: no descriptor, no address, no size and no flag that any call takes.
fn call(number: u32) -> Script {
    // It answers an unknown command as if it were not there.
    const MODIFY_LDT: u32 = 154;
    // These two answer unknown flags with EINVAL, as the filter does: no descriptor, no flag.
    const SPLICE: u32 = 275;
    const TEE: u32 = 276;
    let arguments = match number {
        MODIFY_LDT => [0; 6],
        SPLICE | TEE => [-1, 0, -1, 0, 1, 0],
        _ => [-1; 6],
    };
    script(|b| {
        b.attack_number(number, &arguments.map(n));
    })
}
