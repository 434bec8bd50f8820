//! TLS for servers of tests: certificates of an authority of the test's own, and a proxy that takes TLS
//! for a server that speaks none. Needs `openssl` and `python3`.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{
    exec::{both_streams, text},
    runner::directory,
};

/// A process that ends with its test.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// A certificate authority of this test's own, and a certificate of it for 127.0.0.1 and
/// for `registry.test`: files of both, and of its key.
pub fn certificates() -> [PathBuf; 3] {
    let at = |name: &str| directory().join(name);
    let openssl = |words: &[&str]| {
        let done = Command::new("openssl").args(words).current_dir(directory()).output().unwrap();
        assert!(done.status.success(), "{}", both_streams(&done));
    };
    let new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj"];
    openssl(&[&new[..], &["/CN=test authority", "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem"]].concat());
    openssl(&[&new[..], &["/CN=test", "-keyout", "own.key", "-out", "own.csr"]].concat());
    fs::write(at("own.ext"), "subjectAltName = IP:127.0.0.1, DNS:registry.test\n").unwrap();
    openssl(&[
        "x509",
        "-req",
        "-in",
        "own.csr",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        "own.ext",
        "-out",
        "own.pem",
    ]);
    [at("ca.pem"), at("own.pem"), at("own.key")]
}

/// Takes TLS, and passes on what comes in it to a port of this host.
const PROXY: &str = r#"
import socket, ssl, sys, threading
certificate, key, to = sys.argv[1], sys.argv[2], int(sys.argv[3])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate, key)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
def copy(one, other):
    try:
        while data := one.recv(65536):
            other.sendall(data)
    except OSError:
        pass
    for end in (one, other):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
def serve(plain):
    try:
        inside = context.wrap_socket(plain, server_side=True)
    except OSError:
        return
    behind = socket.create_connection(("127.0.0.1", to))
    threading.Thread(target=copy, args=(inside, behind), daemon=True).start()
    copy(behind, inside)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"#;

/// Such a proxy, and its port.
pub fn tls_proxy(certificate: &Path, key: &Path, to: u16) -> (Killed, u16) {
    let words = ["-c", PROXY, text(certificate), text(key), &to.to_string()];
    let mut child = Killed(Command::new("python3").args(words).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (child, line.trim().parse().unwrap())
}
