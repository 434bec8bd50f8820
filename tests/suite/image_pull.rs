//! `stockade image pull`: an image comes as its registry has it, a password goes to no other host, and
//! a registry that lies leaves nothing in the store.

use std::{
    fs,
    io::{self, Write},
    net::{Shutdown, TcpStream},
    os::unix::{fs::PermissionsExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Mutex,
    thread,
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};

use crate::support::{
    exec::{both_streams, text},
    images::{digest, image as image_command, store, trees},
    registry::{Image, Registry, Reply, header, path_of},
    runner::{directory, eventually, test},
    timeouts::scaled,
    tls::{certificates, tls_proxy},
};

const PASSWORD: &str = "pass-word-of-the-test";

fn pull(words: &[&str]) -> Output {
    pull_command(words).output().unwrap()
}

fn pull_command(words: &[&str]) -> Command {
    image_command([&["pull"], words].concat())
}

#[track_caller]
fn succeeded(done: &Output) -> String {
    assert!(done.status.success(), "{}", both_streams(done));
    String::from_utf8_lossy(&done.stdout).into_owned()
}

#[track_caller]
fn refused(done: &Output, words: &[&str]) {
    let said = both_streams(done);
    assert!(!done.status.success(), "{said}");
    for word in words {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert!(!said.contains(PASSWORD) && !said.contains(&BASE64_STANDARD.encode(format!("user:{PASSWORD}"))), "{said}");
}

/// A file with the password for a host.
fn credentials(host: &str) -> PathBuf {
    let path = directory().join("config.json");
    let auth = BASE64_STANDARD.encode(format!("user:{PASSWORD}"));
    fs::write(&path, json!({"auths": {host: {"auth": auth}}}).to_string()).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// What the store has of images, and what is unfinished.
fn content() -> Vec<String> {
    let parts = ["images", "names", "layers", "tmp"].map(|part| store().join(part));
    let entries = parts.iter().filter_map(|part| fs::read_dir(part).ok()).flatten();
    entries.map(|entry| text(&entry.unwrap().path()).to_owned()).collect()
}

test!(Both, an_image_is_pulled_and_its_digest_is_what_its_registry_says);
fn an_image_is_pulled_and_its_digest_is_what_its_registry_says() {
    let image = Image::new("first");
    let registry = Registry::of(&image);
    let said = succeeded(&pull(&[&registry.reference()]));
    assert!(said.contains(&image.digest()), "{said}");
    assert_eq!(fs::read_to_string(trees(&registry.reference())[1].join("marker")).unwrap(), "first");
    let listed = succeeded(&image_command(["ls"]).output().unwrap());
    assert!(listed.contains(&registry.reference()), "{listed}");
    // Again, and by digest, of the index and of the image: no layer is fetched.
    let by_digest = |digest: &str| format!("127.0.0.1:{}/a/b@{digest}", registry.port);
    for reference in [registry.reference(), by_digest(&digest(&image.index)), by_digest(&image.digest())] {
        assert!(succeeded(&pull(&[&reference])).contains(&image.digest()));
    }
    assert_eq!((registry.count(&image.layer_path(0)), registry.count(&image.layer_path(1))), (1, 1));
    // Another image shares the lower layer.
    let other = Image::new("second");
    let registry = Registry::of(&other);
    succeeded(&pull(&[&registry.reference(), "--name", "other:1"]));
    assert_eq!((registry.count(&other.layer_path(0)), registry.count(&other.layer_path(1))), (0, 1));
    refused(&pull(&[&format!("127.0.0.1:{}/a/b:2", registry.port)]), &["does not have 127.0.0.1"]);
    refused(&pull(&["https://example.com/a"]), &["it has a scheme"]);
    refused(&pull(&[&registry.reference(), "--platform", "linux/arm64"]), &["no image for linux/arm64; there are linux/amd64"]);
}

test!(Both, a_registry_that_lies_leaves_nothing_in_the_store, seconds 60);
fn a_registry_that_lies_leaves_nothing_in_the_store() {
    let (image, other) = (Image::new("first"), Image::new("other"));
    let upper = image.layers[1].clone();
    let cut = upper[..upper.len() - 1].to_vec();
    let changed: Vec<u8> = upper.iter().map(|byte| if *byte == b'f' { b'g' } else { *byte }).collect();
    let manifest = format!("/v2/a/b/manifests/{}", image.digest());
    let config = format!("/v2/a/b/blobs/{}", digest(&image.config));
    let layer = image.layer_path(1);
    for (path, body, words) in [
        (&layer, changed, "is promised"),
        (&layer, cut, "bytes by its descriptor"),
        (&layer, [upper.as_slice(), b"x"].concat(), "bytes by its descriptor"),
        (&manifest, other.manifest.clone(), "is promised"),
        (&manifest, vec![b' '; 5 << 20], "more than 4096 KiB"),
        (&config, other.config.clone(), "is promised"),
    ] {
        let (wanted, reply) = (path.clone(), Reply::new(200, "", &body));
        let registry = Registry::at("127.0.0.1", image.clone(), move |head| (path_of(head) == wanted).then(|| reply.clone()));
        refused(&pull(&[&registry.reference()]), &[words]);
        assert_eq!(content(), [""; 0], "{words}");
    }
    // The control.
    succeeded(&pull(&[&Registry::of(&image).reference()]));
    assert!(!content().is_empty());
}

test!(Both, what_a_killed_pull_leaves_is_removed_by_the_next);
fn what_a_killed_pull_leaves_is_removed_by_the_next() {
    let image = Image::new("first");
    let layer = image.layer_path(1);
    let (held, served) = (Mutex::new(()), image.clone());
    let held: &'static Mutex<()> = Box::leak(Box::new(held));
    let _never_sent = held.lock().unwrap();
    let silent = Registry::with("127.0.0.1", move |head, stream| {
        let _waits = (path_of(head) == layer).then(|| held.lock());
        served.reply(head).write(stream);
    });
    let ended_by = |number: usize, signal: Signal| {
        let mut child = pull_command(&[&silent.reference()]).spawn().unwrap();
        let is_waiting = || silent.count(&image.layer_path(1)) == number;
        assert!(eventually(scaled(Duration::from_secs(10)), is_waiting), "the upper layer is not asked for");
        rustix::process::kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(signal.as_raw()));
    };
    // One that is told to end takes what it has made along.
    ended_by(1, Signal::TERM);
    assert!(content().is_empty(), "{:?}", content());
    ended_by(2, Signal::KILL);
    assert!(content().iter().all(|path| Path::new(path).starts_with(store().join("tmp"))) && !content().is_empty(), "{:?}", content());
    succeeded(&pull(&[&Registry::of(&image).reference()]));
    assert!(fs::read_dir(store().join("tmp")).unwrap().next().is_none(), "{:?}", content());
}

test!(Both, a_password_goes_to_its_registry_and_to_no_other_host);
fn a_password_goes_to_its_registry_and_to_no_other_host() {
    let image = Image::new("first");
    let basic = format!("Basic {}", BASE64_STANDARD.encode(format!("user:{PASSWORD}")));
    let (layer, bytes) = (image.layer_path(1), image.layers[1].clone());
    // One that gives a token for the password, or without it, and keeps blobs for others.
    let elsewhere = Registry::with("127.0.0.2", move |head, stream| {
        let body: &[u8] = if path_of(head).starts_with("/token") { br#"{"token": "t0"}"# } else { &bytes };
        Reply::new(200, "", body).write(stream);
    });
    let (token, blobs) = (format!("http://127.0.0.2:{}/token", elsewhere.port), format!("http://127.0.0.2:{}/blob", elsewhere.port));
    let registry = |realm: Option<String>| {
        let (basic, layer, blobs) = (basic.clone(), layer.clone(), blobs.clone());
        Registry::at("127.0.0.1", image.clone(), move |head| {
            let challenge = realm.as_ref().map_or_else(|| String::from("Basic realm=\"r\""), |realm| format!("Bearer realm=\"{realm}\""));
            let sent = header(head, "authorization").unwrap_or_default();
            if sent != basic && sent != "Bearer t0" {
                return Some(Reply::new(401, &format!("WWW-Authenticate: {challenge}\r\n"), b""));
            }
            (path_of(head) == layer).then(|| Reply::new(307, &format!("Location: {blobs}\r\n"), b""))
        })
    };
    let host = |registry: &Registry| format!("127.0.0.1:{}", registry.port);
    let (plain, with_realm) = (registry(None), registry(Some(token)));
    refused(&pull(&[&plain.reference()]), &["--creds-file"]);
    assert!(!plain.has_heard_secret());
    refused(&pull(&[&with_realm.reference(), "--creds-file", text(&credentials(&host(&with_realm)))]), &["another's host", "--auth-host"]);
    assert!(elsewhere.heard().is_empty() && content() == [""; 0]);
    // The control: to its own registry, and by a redirect of it to no other.
    let file = credentials(&host(&plain));
    succeeded(&pull(&[&plain.reference(), "--creds-file", text(&file)]));
    assert!(plain.has_heard_secret() && elsewhere.heard().len() == 1 && !elsewhere.has_heard_secret());
    // A realm that the user names gets it.
    succeeded(&pull(&[&with_realm.reference(), "--creds-file", text(&credentials(&host(&with_realm))), "--auth-host", "127.0.0.2"]));
    assert!(elsewhere.has_heard_secret());
    let kept =
        Command::new("grep").args(["-r", "-e", PASSWORD, "-e", &basic["Basic ".len()..], "-e", "t0\""]).arg(store()).output().unwrap();
    assert_eq!(kept.status.code(), Some(1), "{}", both_streams(&kept));
    fs::set_permissions(directory().join("config.json"), fs::Permissions::from_mode(0o644)).unwrap();
    refused(&pull(&[&with_realm.reference(), "--creds-file", text(&directory().join("config.json"))]), &["chmod 600"]);
}

test!(Both, a_layer_that_a_manifest_says_is_elsewhere_is_asked_of_its_registry_alone);
fn a_layer_that_a_manifest_says_is_elsewhere_is_asked_of_its_registry_alone() {
    let asks = Reply::new(401, "WWW-Authenticate: Basic realm=\"r\"\r\n", b"");
    let elsewhere = Registry::with("127.0.0.2", move |_, stream| asks.write(stream));
    let mut image = Image::new("first");
    let mut manifest: Value = serde_json::from_slice(&image.manifest).unwrap();
    manifest["layers"][1]["urls"] = json!([format!("http://127.0.0.2:{}/layer", elsewhere.port)]);
    image.set_manifest(&manifest);
    let layer = image.layer_path(1);
    let lacking = Registry::at("127.0.0.1", image.clone(), move |head| (path_of(head) == layer).then(|| Reply::new(404, "", b"")));
    let file = credentials(&format!("127.0.0.1:{}", lacking.port));
    refused(&pull(&[&lacking.reference(), "--creds-file", text(&file)]), &["does not have the blob"]);
    assert!(elsewhere.heard().is_empty() && content() == [""; 0]);
    // The control: where the registry has it, the image is like any other.
    succeeded(&pull(&[&Registry::of(&image).reference()]));
}

test!(RootlessOnly, dockers_own_file_is_read_and_its_helpers_are_not_run);
fn dockers_own_file_is_read_and_its_helpers_are_not_run() {
    let image = Image::new("first");
    let basic = format!("Basic {}", BASE64_STANDARD.encode(format!("user:{PASSWORD}")));
    let registry = Registry::at("127.0.0.1", image, move |head| {
        (header(head, "authorization") != Some(&basic)).then(|| Reply::new(401, "WWW-Authenticate: Basic realm=\"r\"\r\n", b""))
    });
    let asked = || pull_command(&[&registry.reference()]).env("DOCKER_CONFIG", directory()).output().unwrap();
    let file = directory().join("config.json");
    fs::write(&file, json!({"credsStore": "mark"}).to_string()).unwrap();
    let helper = directory().join("docker-credential-mark");
    fs::write(&helper, format!("#!/bin/sh\ntouch {}/ran\n", directory().display())).unwrap();
    fs::set_permissions(&helper, fs::Permissions::from_mode(0o755)).unwrap();
    let done = pull_command(&[&registry.reference()]).env("DOCKER_CONFIG", directory()).env("PATH", directory()).output().unwrap();
    refused(&done, &["docker-credential-mark has one, and is not run", "--creds-file"]);
    assert!(!directory().join("ran").exists());
    credentials(&format!("127.0.0.1:{}", registry.port));
    succeeded(&asked());
}

test!(Both, an_https_registry_is_one_that_an_authority_vouches_for, needs [Program("openssl"), Program("python3")]);
fn an_https_registry_is_one_that_an_authority_vouches_for() {
    let [authority, certificate, key] = certificates();
    let (image, layer) = (Image::new("first"), Image::new("first").layer_path(1));
    let registry = Registry::of(&image);
    let (_proxy, port) = tls_proxy(&certificate, &key, registry.port);
    let reference = format!("127.0.0.1:{port}/a/b:1");
    refused(&pull(&[&reference, "--ca", text(&key)]), &["has no certificate"]);
    let other = directory().join("other.pem");
    let words = [
        "req",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-subj",
        "/CN=x",
        "-x509",
        "-keyout",
        "x.key",
        "-out",
        text(&other),
    ];
    assert!(Command::new("openssl").args(words).current_dir(directory()).output().unwrap().status.success());
    refused(&pull(&[&reference, "--ca", text(&other)]), &["is not trusted", "--ca"]);
    assert!(registry.heard().is_empty());
    // Of what came by TLS, nothing leads out of it.
    let leads = Registry::at("127.0.0.1", image, move |head| {
        (path_of(head) == layer).then(|| Reply::new(302, &format!("Location: http://127.0.0.1:{}/x\r\n", registry.port), b""))
    });
    let (_leading, leading_port) = tls_proxy(&certificate, &key, leads.port);
    let from_tls = format!("127.0.0.1:{leading_port}/a/b:1");
    refused(&pull(&[&from_tls, "--ca", text(&authority), "--insecure-http", "127.0.0.1:1"]), &["from https to http nothing is followed"]);
    assert_eq!(content(), [""; 0]);
    // The control.
    succeeded(&pull(&[&reference, "--ca", text(&authority)]));
}

/// A proxy of HTTP whose every CONNECT leads to one port of this host.
fn connect_proxy(to: u16) -> Registry {
    Registry::with("127.0.0.1", move |_, client| {
        let mut server = TcpStream::connect(("127.0.0.1", to)).unwrap();
        client.write_all(b"HTTP/1.1 200 Connected\r\n\r\n").unwrap();
        let (mut from_server, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let answers = thread::spawn(move || drop(io::copy(&mut from_server, &mut to_client)));
        let _client_left = io::copy(client, &mut server);
        let _server_left = server.shutdown(Shutdown::Write);
        answers.join().unwrap();
    })
}

test!(Both, a_proxy_of_the_environment_is_for_other_hosts, needs [Program("openssl"), Program("python3")]);
fn a_proxy_of_the_environment_is_for_other_hosts() {
    let [authority, certificate, key] = certificates();
    let registry = Registry::of(&Image::new("first"));
    let (_tls, port) = tls_proxy(&certificate, &key, registry.port);
    let proxy = connect_proxy(port);
    let no_proxy_at_all = pull_command(&["registry.test/a/b:1"]).env("https_proxy", "http://[").env_remove("NO_PROXY").output().unwrap();
    refused(&no_proxy_at_all, &["https_proxy is no URL of a proxy"]);
    let asked = |reference: &str, no_proxy: &str| {
        let mut command = pull_command(&[reference, "--ca", text(&authority)]);
        command.env("HTTPS_PROXY", format!("http://user:{PASSWORD}@127.0.0.1:{}", proxy.port)).env("NO_PROXY", no_proxy);
        command.output().unwrap()
    };
    refused(&asked("registry.test/a/b:1", "registry.test"), &["registry.test", "has no address"]);
    refused(&asked("sub.registry.test/a/b:1", "registry.test"), &["sub.registry.test", "has no address"]);
    succeeded(&asked(&format!("127.0.0.1:{port}/a/b:1"), ""));
    assert!(proxy.heard().is_empty());
    succeeded(&asked("registry.test/a/b:1", "other.test"));
    assert!(proxy.heard()[0].starts_with("CONNECT registry.test:443 ") && header(&proxy.heard()[0], "proxy-authorization").is_some());
    assert!(!registry.has_heard_secret());
}
