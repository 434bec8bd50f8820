//! Whole pulls from a registry of the test's own on this host, and what a registry can do wrong.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use stockade_images::Digest;

use crate::{FetchError, Options, Registry, Timeouts};

/// A directory that ends with its test.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let path = env::temp_dir().join(format!("registry-{}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&path).unwrap();
        Place(path)
    }

    fn file(&self, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _left_behind = fs::remove_dir_all(&self.0);
    }
}

/// An answer: its status, its headers, its body.
type Reply = (u16, String, Vec<u8>);

/// A server on this host, and the heads of the requests that it got.
struct Server {
    host: String,
    heard: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// `answer` gets the head of a request; without an answer it writes itself.
    fn new(address: &str, answer: impl Fn(&str, &mut TcpStream) -> Option<Reply> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let (host, heard, answer) = (listener.local_addr().unwrap().to_string(), Arc::default(), Arc::new(answer));
        let all: Arc<Mutex<Vec<String>>> = Arc::clone(&heard);
        thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let (all, answer) = (Arc::clone(&all), Arc::clone(&answer));
                thread::spawn(move || {
                    let mut head = String::new();
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).unwrap_or(0) > 0 {}
                    all.lock().unwrap().push(head.clone());
                    if let Some((status, headers, body)) = answer(&head, &mut stream) {
                        send(&mut stream, status, &format!("{headers}Content-Length: {}\r\n", body.len()), &body);
                    }
                });
            }
        });
        Server { host, heard }
    }

    fn heard(&self) -> Vec<String> {
        self.heard.lock().unwrap().clone()
    }

    fn count(&self, start: &str) -> usize {
        self.heard().iter().filter(|head| head.starts_with(start)).count()
    }

    fn has_heard_secret(&self) -> bool {
        self.heard().iter().any(|head| head.to_ascii_lowercase().contains("authorization:"))
    }
}

fn send(stream: &mut TcpStream, status: u16, headers: &str, body: &[u8]) {
    let head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\n{headers}\r\n");
    let _client_left = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
}

fn path_of(head: &str) -> &str {
    head.split(' ').nth(1).unwrap_or_default()
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| line.split_once(": ").filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value))
}

/// An image, as a registry has it.
#[derive(Clone)]
struct Image {
    index: Vec<u8>,
    manifest: Vec<u8>,
    config: Vec<u8>,
    layers: Vec<Vec<u8>>,
}

impl Image {
    fn new() -> Self {
        let layers: Vec<Vec<u8>> = vec![vec![b'a'; 200_000], b"second".to_vec()];
        let config = b"{}".to_vec();
        let described = |bytes: &[u8]| json!({"digest": digest_of(bytes).to_string(), "size": bytes.len()});
        let of_layers: Vec<Value> = layers.iter().map(|layer| described(layer)).collect();
        let manifest = json!({"config": described(&config), "layers": of_layers}).to_string().into_bytes();
        let index = json!({"manifests": [described(&manifest)]}).to_string().into_bytes();
        Image { index, manifest, config, layers }
    }

    /// What a registry that keeps to the protocol answers.
    fn reply(&self, head: &str) -> Reply {
        let path = path_of(head);
        let manifests = [("1".to_owned(), &self.index), (digest_of(&self.index).to_string(), &self.index)];
        let manifests = manifests.into_iter().chain([(digest_of(&self.manifest).to_string(), &self.manifest)]);
        let blobs = self.layers.iter().chain([&self.config]).map(|blob| (digest_of(blob).to_string(), blob));
        let of = |part: &'static str| move |(name, bytes): (String, _)| (format!("/v2/a/b/{part}/{name}"), bytes);
        let found = manifests.map(of("manifests")).chain(blobs.map(of("blobs"))).find(|(place, _)| path == place);
        found.map_or_else(|| (404, String::new(), b"{}".to_vec()), |(_, bytes)| (200, String::new(), bytes.clone()))
    }

    fn layer_path(&self) -> String {
        format!("/v2/a/b/blobs/{}", digest_of(&self.layers[0]))
    }

    /// A registry that serves it, and answers `special` otherwise.
    fn served(self, special: impl Fn(&str, &mut TcpStream) -> Option<Option<Reply>> + Send + Sync + 'static) -> Server {
        Server::new("127.0.0.1", move |head, stream| special(head, stream).unwrap_or_else(|| Some(self.reply(head))))
    }
}

fn digest_of(bytes: &[u8]) -> Digest {
    Digest::of_bytes(&Sha256::digest(bytes).into())
}

fn options() -> Options {
    Options {
        credentials: None,
        ca: None,
        insecure_http: Vec::new(),
        auth_hosts: Vec::new(),
        timeouts: Timeouts {
            connect: Duration::from_secs(5),
            silence: Duration::from_secs(1),
            document: Duration::from_secs(5),
            pause: Duration::from_millis(1),
        },
    }
}

/// Pulls `a/b:1` of a server: its manifest, its configuration and its layers.
fn pull(server: &Server, options: &Options) -> Result<Vec<Vec<u8>>, FetchError> {
    pull_reference(&format!("{}/a/b:1", server.host), options)
}

fn pull_reference(reference: &str, options: &Options) -> Result<Vec<Vec<u8>>, FetchError> {
    let registry = Registry::new(reference.parse().unwrap(), options.clone())?;
    let mut manifest = registry.resolve()?.bytes;
    let parsed = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
    let digest = |of: &Value| of["digest"].as_str().unwrap().parse::<Digest>().unwrap();
    if let Some(entry) = parsed(&manifest)["manifests"].get(0) {
        manifest = registry.manifest(&digest(entry))?.bytes;
    }
    let described = parsed(&manifest);
    let mut parts = vec![manifest];
    for part in [&described["config"]].into_iter().chain(described["layers"].as_array().unwrap()) {
        let mut bytes = Vec::new();
        let read = registry.blob(&digest(part), part["size"].as_u64().unwrap()).read_to_end(&mut bytes);
        read.map_err(|error| *error.into_inner().unwrap().downcast::<FetchError>().unwrap())?;
        parts.push(bytes);
    }
    Ok(parts)
}

fn error_of(server: &Server, options: &Options) -> String {
    pull(server, options).unwrap_err().to_string()
}

fn login(place: &Place, host: &str) -> PathBuf {
    let auth = BASE64_STANDARD.encode("user:secret");
    place.file("config.json", &json!({"auths": {host: {"auth": auth}}}).to_string(), 0o600)
}

#[test]
fn an_image_arrives_as_its_registry_has_it() {
    let image = Image::new();
    let server = image.clone().served(|_, _| None);
    let parts = [&image.manifest, &image.config, &image.layers[0], &image.layers[1]].map(Vec::clone);
    assert_eq!(pull(&server, &options()).unwrap(), parts);
    assert_eq!(server.heard().len(), 5);
    // By digest, of the index and of the manifest.
    for digest in [digest_of(&image.index), digest_of(&image.manifest)] {
        assert_eq!(pull_reference(&format!("{}/a/b:other@{digest}", server.host), &options()).unwrap(), parts);
    }
}

#[test]
fn a_registry_that_lies_is_an_error_that_says_so() {
    let image = Image::new();
    let (layer, tag, by_digest) =
        (image.layer_path(), String::from("/v2/a/b/manifests/1"), format!("/v2/a/b/manifests/{}", digest_of(&image.index)));
    let plain = |bytes: &[u8]| (200, String::new(), bytes.to_vec());
    let other_digest = format!("Docker-Content-Digest: {}\r\n", digest_of(b""));
    for (reference, path, reply, words) in [
        ("a/b:1", &layer, plain(&[b'a'; 199_999]), "sends 199999 bytes"),
        ("a/b:1", &layer, plain(&[b'a'; 200_001]), "sends 200001 bytes"),
        ("a/b:1", &layer, (206, String::from("Content-Range: bytes 1-200000/200001\r\n"), vec![b'a'; 200_000]), "another part"),
        ("a/b:1", &layer, (204, String::new(), Vec::new()), "status 204"),
        ("a/b:1", &layer, (404, String::new(), Vec::new()), "does not have the blob"),
        ("a/b:1", &tag, plain(&vec![b' '; 5 << 20]), "more than 4096 KiB"),
        ("a/b:1", &tag, (200, other_digest, image.index.clone()), "which must be sha256:e3b0"),
        ("a/b", &by_digest, plain(&image.manifest), "which must be sha256:"),
    ] {
        let wanted = path.clone();
        let server = image.clone().served(move |head, _| (path_of(head) == wanted).then(|| Some(reply.clone())));
        let reference = if reference == "a/b" { format!("a/b@{}", digest_of(&image.index)) } else { reference.to_owned() };
        let error = pull_reference(&format!("{}/{reference}", server.host), &options()).unwrap_err().to_string();
        assert!(error.contains(words), "{path} {words}: {error}");
        assert_eq!(server.count(&format!("GET {path} ")), 1, "a lie is not asked for again: {error}");
    }
}

#[test]
fn a_blob_without_a_stated_length_ends_where_its_descriptor_says() {
    let image = Image::new();
    let layer = image.layer_path();
    let server = image.clone().served(move |head, stream| {
        (path_of(head) == layer).then(|| {
            send(stream, 200, "Transfer-Encoding: chunked\r\n", b"");
            let chunk = [b"10000\r\n".as_slice(), &[b'a'; 0x10000], b"\r\n"].concat();
            while stream.write_all(&chunk).is_ok() {}
            None
        })
    });
    assert!(error_of(&server, &options()).contains("sends more bytes"));
    let registry = Registry::new(format!("{}/a/b:1", server.host).parse().unwrap(), options()).unwrap();
    let mut got = Vec::new();
    registry.blob(&digest_of(&image.layers[0]), 200_000).read_to_end(&mut got).unwrap_err();
    assert_eq!(got.len(), 200_000);
}

#[test]
fn a_transfer_that_breaks_goes_on_where_it_stopped() {
    for can_go_on in [true, false] {
        let image = Image::new();
        let (layer, bytes) = (image.layer_path(), image.layers[0].clone());
        let server = image.clone().served(move |head, stream| {
            let from: usize = header(head, "range").map_or(0, |range| range[6..range.len() - 1].parse().unwrap());
            (path_of(head) == layer).then(|| {
                if from > 0 && can_go_on {
                    return Some((206, format!("Content-Range: bytes {from}-199999/200000\r\n"), bytes[from..].to_vec()));
                }
                if from > 0 {
                    return Some((200, String::new(), bytes.clone()));
                }
                send(stream, 200, "Content-Length: 200000\r\n", &bytes[..100_000]);
                None
            })
        });
        assert_eq!(pull(&server, &options()).unwrap()[2], image.layers[0]);
        let asked: Vec<String> = server.heard().into_iter().filter(|head| head.contains(&image.layer_path())).collect();
        assert_eq!((asked.len(), header(&asked[1], "range")), (2, Some("bytes=100000-")));
    }
}

#[test]
fn a_registry_that_is_busy_or_breaks_off_is_asked_five_times() {
    let image = Image::new();
    let layer = image.layer_path();
    let broken = image.clone().served(move |head, stream| {
        (path_of(head) == layer).then(|| {
            send(stream, 200, "Content-Length: 200000\r\n", b"");
            None
        })
    });
    assert!(error_of(&broken, &options()).contains("broke off, again and again"));
    assert_eq!(broken.count(&format!("GET {}", image.layer_path())), 5);
    let busy = Server::new("127.0.0.1", |_, _| {
        Some((503, String::from("Retry-After: 0\r\n"), br#"{"errors": [{"message": "no\u001b[2J\nroom"}]}"#.to_vec()))
    });
    let error = error_of(&busy, &options());
    assert!(error.contains("status 503, no\\u{1b}[2J room") && busy.heard().len() == 5, "{error}");
    let later = Server::new("127.0.0.1", |_, _| Some((429, String::from("Retry-After: 3600\r\n"), Vec::new())));
    assert!(error_of(&later, &options()).contains("wait 3600 s"));
    assert_eq!(later.heard().len(), 1);
}

#[test]
fn a_registry_that_says_nothing_is_left() {
    let silent = |options: &Options, answer: fn(&mut TcpStream)| {
        let image = Image::new();
        let layer = image.layer_path();
        let server = image.served(move |head, stream| {
            (path_of(head) == layer).then(|| {
                answer(stream);
                None
            })
        });
        let begun = Instant::now();
        let error = error_of(&server, options);
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        error
    };
    let quick = Timeouts { silence: Duration::from_millis(100), ..options().timeouts };
    let options = Options { timeouts: quick, ..options() };
    for answer in [
        // Before the head, and after it.
        (|_: &mut TcpStream| thread::sleep(Duration::from_secs(30))) as fn(&mut TcpStream),
        |stream| {
            send(stream, 200, "Content-Length: 200000\r\n", b"");
            thread::sleep(Duration::from_secs(30));
        },
    ] {
        let error = silent(&options, answer);
        assert!(error.contains("broke off, again and again"), "{error}");
    }
}

#[test]
fn a_server_that_sends_a_byte_now_and_then_is_left() {
    let image = Image::new();
    let layer = image.layer_path();
    let server = image.clone().served(move |head, stream| {
        (path_of(head) == layer).then(|| {
            send(stream, 200, "Content-Length: 200000\r\n", b"");
            while stream.write_all(b"a").is_ok() {
                thread::sleep(Duration::from_millis(100));
            }
            None
        })
    });
    let begun = Instant::now();
    let slow = Options { timeouts: Timeouts { silence: Duration::from_millis(500), ..options().timeouts }, ..options() };
    assert!(error_of(&server, &slow).contains("bytes in 1 s"));
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert_eq!(server.count(&format!("GET {}", image.layer_path())), 5);
}

#[test]
fn a_server_that_sends_slowly_what_is_here_already_is_left() {
    let image = Image::new();
    let layer = image.layer_path();
    let server = image.served(move |head, stream| {
        (path_of(head) == layer).then(|| {
            send(stream, 200, "Content-Length: 200000\r\n", &[b'a'; 1000]);
            // It goes on from the beginning.
            while header(head, "range").is_some() && stream.write_all(b"a").is_ok() {
                thread::sleep(Duration::from_millis(100));
            }
            None
        })
    });
    let begun = Instant::now();
    let slow = Options { timeouts: Timeouts { silence: Duration::from_millis(500), ..options().timeouts }, ..options() };
    assert!(error_of(&server, &slow).contains("bytes in 1 s"));
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
}

/// A registry that wants a token of a realm; the realm, which gives it, and whether with the password.
fn with_token(image: Image, realm: String) -> Server {
    image.served(move |head, _| {
        let path = path_of(head).to_owned();
        if path.starts_with("/token?") {
            let is_fine = path == "/token?service=s%201&scope=repository%3Aa%2Fb%3Apull"
                && header(head, "authorization").is_none_or(|sent| sent == "Basic dXNlcjpzZWNyZXQ=");
            return Some(Some((if is_fine { 200 } else { 401 }, String::new(), br#"{"token": "t0"}"#.to_vec())));
        }
        let realm = if realm.is_empty() { format!("http://{}/token", header(head, "host").unwrap()) } else { realm.clone() };
        let challenge = format!("WWW-Authenticate: Bearer realm=\"{realm}\",service=\"s 1\",scope=\"repository:other:push\"\r\n");
        (header(head, "authorization") != Some("Bearer t0")).then_some(Some((401, challenge, Vec::new())))
    })
}

#[test]
fn a_token_is_asked_for_once_with_the_password_and_a_scope_of_ours() {
    let server = with_token(Image::new(), String::new());
    pull(&server, &options()).unwrap();
    assert!(server.heard().iter().all(|head| header(head, "authorization").is_none_or(|sent| sent == "Bearer t0")));
    assert_eq!((server.count("GET /token?"), server.heard().len()), (1, 7));
    let server = with_token(Image::new(), String::new());
    let place = Place::new();
    let options = Options { credentials: Some(login(&place, &server.host)), ..options() };
    pull(&server, &options).unwrap();
    let asked = server.heard().into_iter().find(|head| head.starts_with("GET /token?")).unwrap();
    assert_eq!(header(&asked, "authorization"), Some("Basic dXNlcjpzZWNyZXQ="));
}

#[test]
fn a_password_goes_to_no_realm_of_another() {
    let image = Image::new();
    // Another host, which the control below gives the same token.
    let other = Server::new("127.0.0.2", |_, _| Some((200, String::new(), br#"{"access_token": "t0"}"#.to_vec())));
    let server = with_token(image.clone(), format!("http://{}/token", other.host));
    let place = Place::new();
    let own = Options { credentials: Some(login(&place, &server.host)), ..options() };
    let error = error_of(&server, &own);
    assert!(error.contains("another's host") && error.contains("--auth-host"), "{error}");
    assert!(other.heard().is_empty() && !error.contains("secret"));
    // Without a password it is asked, and with one if the user says so.
    pull(&server, &options()).unwrap();
    assert!(!other.has_heard_secret() && other.heard().len() == 1);
    let named = Options { credentials: own.credentials.clone(), auth_hosts: vec![String::from("127.0.0.2")], ..options() };
    pull(&server, &named).unwrap();
    assert!(other.has_heard_secret());
    for (realm, words) in [
        ("http://example.com/token", "plain HTTP"),
        ("http://user@127.0.0.1/token", "a user before the host"),
        ("ftp://127.0.0.1/token", "neither https nor http"),
        ("nothing", "no URL that gives one"),
    ] {
        let error = error_of(&with_token(image.clone(), realm.to_owned()), &options());
        assert!(error.contains(words), "{realm}: {error}");
    }
}

#[test]
fn what_is_no_token_is_refused() {
    for (status, body, words) in [
        (200, "{}", "gives no token"),
        (200, "<html>", "no JSON"),
        (200, r#"{"token": "a\r\nb"}"#, "no word"),
        (302, "", "status 302"),
        (401, r#"{"errors": [{"message": "who?"}]}"#, "who?"),
    ] {
        let server = Image::new().served(move |head, _| {
            let is_token = path_of(head).starts_with("/token?");
            let challenge = format!("WWW-Authenticate: Bearer realm=\"http://{}/token\"\r\n", header(head, "host").unwrap());
            Some(Some(if is_token {
                (status, String::from("Location: http://127.0.0.1:1/\r\n"), body.into())
            } else {
                (401, challenge, Vec::new())
            }))
        });
        let error = error_of(&server, &options());
        assert!(error.contains(words), "{words}: {error}");
    }
    // A token that is then not taken is not asked for again and again.
    let server = Image::new().served(|head, _| {
        let is_token = path_of(head).starts_with("/token?");
        let challenge = format!("WWW-Authenticate: Bearer realm=\"http://{}/token\"\r\n", header(head, "host").unwrap());
        Some(Some(if is_token { (200, String::new(), br#"{"token": "x"}"#.to_vec()) } else { (401, challenge, Vec::new()) }))
    });
    assert!(error_of(&server, &options()).contains("status 401"));
    assert_eq!(server.heard().len(), 3);
}

#[test]
fn a_password_is_sent_where_it_is_asked_for_and_to_no_other_registry() {
    let basic = || {
        Image::new().served(|head, _| {
            let is_known = header(head, "authorization") == Some("Basic dXNlcjpzZWNyZXQ=");
            (!is_known).then(|| Some((401, String::from("WWW-Authenticate: Basic realm=\"r\"\r\n"), Vec::new())))
        })
    };
    let (server, place) = (basic(), Place::new());
    let own = Options { credentials: Some(login(&place, &server.host)), ..options() };
    pull(&server, &own).unwrap();
    // Its first request has none: a registry that asks for no password gets none.
    assert!(header(&server.heard()[0], "authorization").is_none());
    let stranger = basic();
    let error = error_of(&stranger, &own);
    assert!(error.contains("--creds-file") && !stranger.has_heard_secret(), "{error}");
    let helper = place.file("helper.json", r#"{"credsStore": "desktop"}"#, 0o600);
    let error = error_of(&stranger, &Options { credentials: Some(helper), ..options() });
    assert!(error.contains("docker-credential-desktop has one, and is not run"), "{error}");
    // A file that others can read gives no password, but is one for a registry that it does not name.
    fs::set_permissions(own.credentials.as_ref().unwrap(), fs::Permissions::from_mode(0o644)).unwrap();
    assert!(error_of(&server, &own).contains("chmod 600"));
    let open = Image::new().served(|_, _| None);
    pull(&open, &own).unwrap();
    let broken = place.file("broken.json", "{\"auths\": secret}", 0o600);
    let error = error_of(&open, &Options { credentials: Some(broken), ..options() });
    assert!(error.contains("line 1") && !error.contains("secret"), "{error}");
    let digest = Image::new().served(|_, _| Some(Some((401, String::from("WWW-Authenticate: Negotiate\r\n"), Vec::new()))));
    assert!(error_of(&digest, &options()).contains("`negotiate`"));
}

#[test]
fn a_redirect_is_followed_without_what_authorises() {
    let image = Image::new();
    let layer = image.layers[0].clone();
    let other = Server::new("127.0.0.2", move |_, _| Some((200, String::new(), layer.clone())));
    let path = image.layer_path();
    let place = format!("http://{}/x?signature=s3cret", other.host);
    let redirects = move |head: &str| (path_of(head) == path).then(|| (307, format!("Location: {place}\r\n"), Vec::new()));
    let server = image.clone().served(move |head, _| {
        if header(head, "authorization") != Some("Basic dXNlcjpzZWNyZXQ=") {
            return Some(Some((401, String::from("WWW-Authenticate: Basic realm=\"r\"\r\n"), Vec::new())));
        }
        redirects(head).map(Some)
    });
    let place = Place::new();
    let own = Options { credentials: Some(login(&place, &server.host)), ..options() };
    pull(&server, &own).unwrap();
    assert!(other.heard().len() == 1 && !other.has_heard_secret());
}

#[test]
fn where_a_redirect_may_lead_has_rules() {
    let image = Image::new();
    let asks = Server::new("127.0.0.2", |_, _| Some((401, String::from("WWW-Authenticate: Basic realm=\"r\"\r\n"), Vec::new())));
    let asking = format!("http://{}/", asks.host);
    for (place, words) in [
        ("http://example.com/x?signature=s3cret", "plain HTTP"),
        ("http://u:p@127.0.0.1/x", "a user before the host"),
        ("file:///etc/passwd", "no URL"),
        ("", "no URL"),
        ("//127.0.0.1/x", "names no host"),
        ("/v2/a/b/manifests/1", "sixth redirect"),
        (&*asking, "it asks for a password, and is another host"),
    ] {
        let (layer, place) = (image.layer_path(), place.to_owned());
        let to = place.clone();
        let is_loop = place.starts_with("/v2");
        let server = image.clone().served(move |head, _| {
            let is_asked = path_of(head) == layer || is_loop && path_of(head).contains("/manifests/");
            is_asked.then(|| Some((302, format!("Location: {to}\r\n"), Vec::new())))
        });
        let own = Place::new();
        let error = error_of(&server, &Options { credentials: Some(login(&own, &server.host)), ..options() });
        assert!(error.contains(words) && !error.contains("s3cret"), "{place}: {error}");
        assert!(!asks.has_heard_secret());
    }
}

#[test]
fn plain_http_is_for_this_host_and_those_that_are_named() {
    let done = pull_reference(
        "192.0.2.1:1/a/b:1",
        &Options { timeouts: Timeouts { connect: Duration::from_millis(100), ..options().timeouts }, ..options() },
    );
    assert!(matches!(done, Err(FetchError::Unreachable { .. })));
    for host in ["a/b", "http://h", "h:0", ""] {
        let named = Options { insecure_http: vec![host.to_owned()], ..options() };
        assert!(matches!(pull_reference("127.0.0.1:1/a/b:1", &named), Err(FetchError::Host { .. })), "{host}");
    }
    let refused = pull_reference("127.0.0.1:1/a/b:1", &options()).unwrap_err().to_string();
    assert!(refused.contains("connect to 127.0.0.1:1"), "{refused}");
}
