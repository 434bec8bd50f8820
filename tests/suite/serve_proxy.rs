//! The service behind a reverse proxy, with the configurations of `stockade help deploy`: what is answered,
//! that events go on at once, that a client who hangs up ends its run, and whose host name counts.

use std::{
    fs,
    io::{BufRead, BufReader},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::serve::Service;
use crate::support::{
    exec::{text, token},
    leftovers::host_process_with,
    runner::{directory, eventually, is_root, test},
    timeouts::scaled,
};

const HOST: &str = "stockade.example.org";

/// A proxy of one test, and the service behind it.
struct Proxy {
    child: Child,
    service: Service,
    place: PathBuf,
    port: u16,
}

impl Proxy {
    /// Starts what `start` makes of: its directory, and its port and the service's.
    fn new(start: impl Fn(&Path, u16, u16) -> Command) -> Self {
        let place = directory().join("proxy");
        fs::create_dir(&place).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", &format!("/CN={HOST}")])
            .args(["-addext", &format!("subjectAltName=DNS:{HOST}"), "-keyout", "key.pem", "-out", "cert.pem"])
            .current_dir(&place)
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let service = Service::with("", "");
        let config = service.place.0.join("serve.toml");
        let hosts = format!("schema = 1\nhosts = [{HOST:?}, \"{HOST}:{port}\"]\n");
        fs::write(&config, fs::read_to_string(&config).unwrap().replacen("schema = 1\n", &hosts, 1)).unwrap();
        service.signal("HUP");
        assert!(eventually(scaled(Duration::from_secs(10)), || service.log().contains("was read again")), "{}", service.log());
        let log = fs::File::create(place.join("log")).unwrap();
        let child = start(&place, port, service.port).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let proxy = Proxy { child, service, place, port };
        let is_there = eventually(scaled(Duration::from_secs(20)), || TcpStream::connect(("127.0.0.1", port)).is_ok());
        assert!(is_there, "{}", fs::read_to_string(proxy.place.join("log")).unwrap());
        proxy
    }

    /// curl, as a client on another host would use it, with further words.
    fn curl(&self, code: &str, words: &[&str]) -> Command {
        let header = self.place.join("header");
        fs::write(&header, format!("Authorization: Bearer {}\nContent-Type: application/json\n", self.service.token)).unwrap();
        let (resolve, url) = (format!("{HOST}:{}:127.0.0.1", self.port), format!("https://{HOST}:{}/v1/run", self.port));
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--no-buffer", "--max-time", "60", "--resolve", &resolve, "--cacert"]);
        curl.arg(self.place.join("cert.pem")).arg("-H").arg(format!("@{}", text(&header)));
        curl.args(["-d", &json!({ "code": code }).to_string(), &url]).args(words);
        curl
    }

    fn asks(&self, code: &str, words: &[&str]) -> Value {
        let output = self.curl(code, words).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    }

    fn stream(&self, code: &str) -> (Child, BufReader<ChildStdout>) {
        let mut curl = self.curl(code, &["-H", "Accept: application/x-ndjson"]).stdout(Stdio::piped()).spawn().unwrap();
        let events = BufReader::new(curl.stdout.take().unwrap());
        (curl, events)
    }

    /// What a client behind it gets, however it is made.
    fn serves(&self) {
        let done = self.asks("print(6*7)", &[]);
        assert_eq!((&done["verdict"], &done["output"]), (&json!("exited"), &json!("42\n")), "{done}");
        // Each event when it happens: that of the first line long before the last.
        let (mut curl, events) = self.stream("import time\nprint('first', flush=True)\ntime.sleep(2)\nprint('last')");
        let mut seen: Vec<(String, Instant)> = Vec::new();
        for line in events.lines() {
            let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
            seen.push((format!("{}{}", event["type"].as_str().unwrap(), event["text"]), Instant::now()));
        }
        assert!(curl.wait().unwrap().success());
        let when = |name: &str| seen.iter().find(|(event, _)| event.starts_with(name)).unwrap_or_else(|| panic!("no {name}: {seen:?}")).1;
        let apart = when("result").duration_since(when("stdout\"first"));
        assert!(apart > Duration::from_secs(1), "{apart:?} {seen:?}");
        // Who goes ends the run, through the proxy.
        let mark = token("proxied");
        let (mut curl, _events) = self.stream(&format!("import subprocess; subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])"));
        // The command line of curl has it, too.
        let runs = || host_process_with(&format!("sleep 60; : {mark}")) && !self.service_is_idle();
        assert!(eventually(scaled(Duration::from_secs(10)), runs), "{}", self.service.log());
        curl.kill().unwrap();
        curl.wait().unwrap();
        // A stream without a reader may be resumed for 10 s.
        assert!(eventually(scaled(Duration::from_secs(40)), || self.service_is_idle()), "it outlives its client");
    }

    fn service_is_idle(&self) -> bool {
        let runs = self.service.ask("GET", "/v1/runs", &self.service.token, &Value::Null);
        runs.body["runs"].as_array().is_some_and(|runs| runs.is_empty())
    }

    fn end(mut self) {
        super::serve::kill(i32::try_from(self.child.id()).unwrap(), "TERM");
        self.child.wait().unwrap();
        self.service.end();
    }
}

/// The block of the page that begins so.
fn block_of_page(start: &str) -> String {
    let tests = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let page = fs::read_to_string(tests.parent().unwrap().join("crates/cli/help/deploy.md")).unwrap();
    let blocks = page.split("\n```").filter_map(|block| block.split_once('\n')).map(|(_, block)| block.to_owned());
    blocks.into_iter().find(|block| block.starts_with(start)).unwrap_or_else(|| panic!("no block begins with {start}"))
}

#[track_caller]
fn replaced(text: &str, pairs: &[(&str, String)]) -> String {
    pairs.iter().fold(text.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "{from}: {text}");
        text.replace(from, to)
    })
}

test!(Both, nginx_as_the_page_has_it_passes_events_on_at_once, needs [Program("nginx"), Program("openssl"), Program("curl")], seconds 90);
fn nginx_as_the_page_has_it_passes_events_on_at_once() {
    let proxy = Proxy::new(|place, port, service| {
        let at = |name: &str| text(&place.join(name)).to_owned();
        let server = replaced(
            &block_of_page("server {"),
            &[
                ("listen 443 ssl", format!("listen 127.0.0.1:{port} ssl")),
                ("/etc/ssl/certs/stockade.pem", at("cert.pem")),
                ("/etc/ssl/private/stockade.key", at("key.pem")),
                ("127.0.0.1:8722", format!("127.0.0.1:{service}")),
            ],
        );
        let user = if is_root() { "user root;" } else { "" };
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].map(|name| format!("{name}_temp_path {};", at(name))).concat();
        let config = format!("{user}\ndaemon off;\npid {};\nevents {{}}\nhttp {{ access_log off; {temporary}\n{server}\n}}\n", at("pid"));
        fs::write(place.join("nginx.conf"), config).unwrap();
        let mut nginx = Command::new("nginx");
        nginx.args(["-e", "stderr", "-c", &at("nginx.conf")]);
        nginx.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        nginx
    });
    proxy.serves();
    // The name that the client wrote counts, whatever it says beside it.
    let words = ["-H", "Host: evil.example", "-H", "X-Forwarded-Host: stockade.example.org"];
    assert_eq!(proxy.asks("print(1)", &words)["reason"], "host_unknown");
    let forwarded = ["-H", "X-Forwarded-Host: evil.example", "-H", "X-Forwarded-For: 127.0.0.1"];
    assert_eq!(proxy.asks("print(1)", &forwarded)["output"], "1\n");
    proxy.end();
}

test!(Both, caddy_as_the_page_has_it_passes_events_on_at_once, needs [Program("caddy"), Program("openssl"), Program("curl")], seconds 90);
fn caddy_as_the_page_has_it_passes_events_on_at_once() {
    let proxy = Proxy::new(|place, port, service| {
        let at = |name: &str| text(&place.join(name)).to_owned();
        let site = replaced(
            &block_of_page(&format!("{HOST} {{")),
            &[
                (&format!("{HOST} {{"), format!("https://{HOST}:{port} {{\n\tbind 127.0.0.1\n\ttls {} {}", at("cert.pem"), at("key.pem"))),
                ("127.0.0.1:8722", format!("127.0.0.1:{service}")),
            ],
        );
        fs::write(place.join("Caddyfile"), format!("{{\n\tadmin off\n\tauto_https disable_redirects\n}}\n{site}\n")).unwrap();
        let mut caddy = Command::new("caddy");
        caddy.args(["run", "--adapter", "caddyfile", "--config", &at("Caddyfile")]);
        caddy.env("HOME", place).env("XDG_DATA_HOME", place).env("XDG_CONFIG_HOME", place);
        caddy
    });
    proxy.serves();
    proxy.end();
}
