//! Files: what of the host can be seen, and what can be changed.

use crate::{
    attack::{Attack, Class, Control, Expected, Place, Wanted},
    script::{CWD, n, on_path, script},
    words::errno::{EACCES, ENOENT, EROFS},
    world::World,
};

const CLASS: Class = Class::FileSystem;
const ROOT: &[&str] = &["mounts", "landlock"];

pub(crate) fn attacks(world: &World) -> Vec<Attack> {
    let mut all = Vec::new();
    all.extend(reading_the_host(world));
    all.extend(changing_the_sandbox(world));
    all
}

fn reading_the_host(world: &World) -> Vec<Attack> {
    let read = |path: &str| {
        script(|b| {
            b.read(path);
        })
    };
    let mut all = vec![Attack::new(
        CLASS,
        "a file of the host",
        "read a file that lies on the host beside the scratch",
        ROOT,
        read(&world.secret_path()),
        Expected::Errno(&[ENOENT]),
        Control::Outside(Place::Host, Wanted::Finds),
    )];
    for path in ["/var", "/run", "/root", "/boot", "/srv", "/opt", "/mnt", "/media", "/var/log", "/var/lib", "/sys/fs/cgroup", "/sys/kernel", "/sys/class", "/proc/1/root/"] {
        if world.shows(path) || !std::path::Path::new(path).exists() {
            continue;
        }
        let look = on_path("newfstatat", path, 1, &[CWD]);
        let look = { let mut look = look; let _ = &mut look; look };
        all.push(Attack::new(
            CLASS,
            format!("see {path}"),
            format!("look for the host's {path}"),
            ROOT,
            look,
            Expected::Errno(&[ENOENT, EACCES]),
            Control::Outside(Place::Host, Wanted::Succeeds),
        ));
    }
    all
}

fn changing_the_sandbox(_world: &World) -> Vec<Attack> {
    let create = |path: &str| {
        script(|b| {
            let path = b.text(path);
            b.attack("openat", &[CWD, path, n(0o101), n(0o600)]);
        })
    };
    ["/x", "/usr/x", "/etc/x", "/dev/x", "/home/x"]
        .into_iter()
        .map(|path| {
            Attack::new(
                CLASS,
                format!("create {path}"),
                format!("create the file {path}"),
                ROOT,
                create(path),
                Expected::Errno(&[EROFS, EACCES]),
                Control::Instead(create("/tmp/x"), Wanted::Succeeds),
            )
        })
        .collect()
}
