//! This program once more, as another process: what of the environment it gets.
//!
//! What a manager of services says to the process that it has started is for no other: one that it starts in
//! turn could speak in its name. Who waits for the other process, and with what arguments, is not decided here.

use std::process::Command;

/// What a manager says to the process that it has started (`sd_notify(3)`, `sd_listen_fds(3)`).
const OF_MANAGER: [&str; 6] = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];
/// By these root takes a caller for another user. A key stands for the caller where a service runs something.
const OF_SUDO: [&str; 2] = ["SUDO_UID", "SUDO_GID"];

/// The program that runs, for the same caller.
pub fn own_program() -> Command {
    let mut command = Command::new("/proc/self/exe");
    for name in OF_MANAGER {
        command.env_remove(name);
    }
    command
}

/// The same for a process of a service, whose callers are keys.
pub fn own_program_of_service() -> Command {
    let mut command = own_program();
    for name in OF_SUDO {
        command.env_remove(name);
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_manager_says_goes_to_no_other_process() {
        let removed = |command: &Command| -> Vec<String> {
            let unset = command.get_envs().filter(|(_, value)| value.is_none());
            unset.map(|(name, _)| name.to_string_lossy().into_owned()).collect()
        };
        for (command, of_sudo) in [(own_program(), false), (own_program_of_service(), true)] {
            let removed = removed(&command);
            assert!(OF_MANAGER.iter().all(|name| removed.iter().any(|other| other == name)), "{removed:?}");
            // A session is its caller's, with sudo or without.
            assert!(OF_SUDO.iter().all(|name| removed.iter().any(|other| other == name) == of_sudo), "{removed:?}");
        }
    }
}
