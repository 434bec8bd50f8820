//! A store of images that a test writes by hand, with the programs of the host's shell in it, and the
//! program where that is the launcher's store: root's lies at a fixed path, over which the test's is
//! mounted in a mount namespace of its own.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};

use super::{
    exec::{ExecResult, program_path, run_under, run_with_stdin, stockade, text},
    runner::{directory, is_root},
};

/// Programs of the host that the layer `programs` has in its `/bin`.
const PROGRAMS: [&str; 7] = ["sh", "cat", "ls", "env", "mkdir", "rm", "touch"];

/// Names the directory of a store whose image [`SYSTEM`] is the root of each request to `exec` that
/// names none.
pub const IN_IMAGE: &str = "STOCKADE_TEST_IN_IMAGE";
/// The name of a whole system's image.
pub const SYSTEM: &str = "system";

/// A store.
pub struct ImageStore {
    path: PathBuf,
}

impl ImageStore {
    /// That of [`IN_IMAGE`], where it is set.
    pub fn of_every_request() -> Option<Self> {
        std::env::var_os(IN_IMAGE).map(|path| ImageStore { path: path.into() })
    }

    /// One that has nothing yet, for `stockade image`.
    pub fn empty() -> Self {
        let path = if is_root() { directory().join("images") } else { directory().join("home/.local/share/stockade/images") };
        fs::create_dir_all(&path).unwrap();
        ImageStore { path }
    }

    /// One without images, which has the layer `programs`.
    pub fn new() -> Self {
        let store = ImageStore::empty();
        let path = store.path();
        for part in ["layers", "flat", "images", "names", "tmp"] {
            fs::create_dir_all(path.join(part)).unwrap();
        }
        fs::write(path.join("format"), "2\n").unwrap();
        fs::write(path.join("lock"), "").unwrap();
        store.layer("programs", copy_programs);
        store
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of a layer's files.
    pub fn tree(&self, layer: &str) -> PathBuf {
        self.path.join("layers").join(hex(layer)).join("root")
    }

    /// Adds a layer, which `fill` fills.
    pub fn layer(&self, name: &str, fill: impl FnOnce(&Path)) {
        let tree = self.tree(name);
        fs::create_dir_all(&tree).unwrap();
        fill(&tree);
    }

    /// Adds an image of these layers, bottom first, with these fields in its record, and gives it the
    /// name. Returns its digest.
    pub fn image(&self, name: &str, layers: &[&str], fields: Value) -> String {
        let digest = format!("sha256:{}", hex(&format!("{name}{layers:?}{fields}")));
        let refs: Vec<Value> =
            layers.iter().map(|layer| format!("sha256:{}", hex(layer))).map(|digest| json!({"diff_id": digest, "key": digest})).collect();
        let mut record = json!({
            "digest": digest, "config_digest": digest, "os": "linux", "architecture": "amd64", "created": null, "layers": refs,
            "flat": null, "env": ["PATH=/bin"], "working_dir": "", "entrypoint": [], "cmd": [], "user": "", "size_bytes": 0,
            "source": "a test", "imported_at": 0,
        });
        record.as_object_mut().unwrap().extend(fields.as_object().cloned().unwrap_or_default());
        let file = self.path.join("images").join(digest.trim_start_matches("sha256:")).with_extension("json");
        fs::write(file, record.to_string()).unwrap();
        self.name(name, &digest);
        digest
    }

    /// Gives an image a name.
    pub fn name(&self, name: &str, digest: &str) {
        fs::write(self.path.join("names").join(name.replace(':', "%3A")), digest.trim_start_matches("sha256:")).unwrap();
    }

    /// Words before a command line of the program, by which this is its store; none are needed for an
    /// ordinary user's.
    pub fn words(&self) -> Vec<&str> {
        const MOUNT: &str = "mkdir -p /var/lib/stockade && mount -t tmpfs -o mode=755 store /var/lib/stockade && \
                             mkdir /var/lib/stockade/images && mount --bind \"$0\" /var/lib/stockade/images && exec \"$@\"";
        if !is_root() {
            return Vec::new();
        }
        vec!["unshare", "--mount", "--propagation", "slave", "--", "sh", "-c", MOUNT, text(&self.path)]
    }

    /// A command line of the program, whose store this is.
    pub fn command(&self, arguments: &[&str]) -> Command {
        if !is_root() {
            let mut command = stockade(arguments);
            command.env("XDG_DATA_HOME", self.path.ancestors().nth(2).unwrap());
            return command;
        }
        let program = program_path().unwrap();
        run_under(&[&self.words()[..], &[text(&program)], arguments].concat())
    }

    /// `exec` with these options and this request.
    #[track_caller]
    pub fn exec_with(&self, options: &[&str], request: Value) -> ExecResult {
        ExecResult::of(run_with_stdin(&mut self.command(&[&["exec"], options].concat()), request.to_string().as_bytes()))
    }

    /// A program of the shell in an image, under `default`.
    #[track_caller]
    pub fn sh(&self, image: &str, code: &str) -> ExecResult {
        self.exec_with(&[], json!({"language": "sh", "code": code, "image": image}))
    }
}

/// 64 hex digits that stand for a text.
fn hex(text: &str) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Copies the programs with the libraries that they need, at the libraries' own paths.
fn copy_programs(tree: &Path) {
    let bin = tree.join("bin");
    fs::create_dir(&bin).unwrap();
    for program in PROGRAMS {
        let from = fs::canonicalize(Path::new("/usr/bin").join(program)).unwrap();
        fs::copy(&from, bin.join(program)).unwrap();
        let listed = Command::new("ldd").arg(&from).output().unwrap();
        for word in String::from_utf8_lossy(&listed.stdout).split_whitespace().filter(|word| word.starts_with('/')) {
            let to = tree.join(word.trim_start_matches('/'));
            if !to.exists() {
                fs::create_dir_all(to.parent().unwrap()).unwrap();
                fs::copy(fs::canonicalize(word).unwrap(), to).unwrap();
            }
        }
    }
    symlink("/bin", tree.join("sbin")).unwrap();
}
