//! A registry of images on this host, as a test wants it: one image, and answers that no honest
//! registry gives. It speaks plain HTTP; `tls.rs` has a proxy that takes TLS before it.

use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

use serde_json::{Value, json};

use super::images::{Layer, Layout, Tar, digest};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// An image `a/b:1` of two layers for this platform, below an index.
#[derive(Clone)]
pub struct Image {
    /// What the tag names.
    pub index: Vec<u8>,
    /// The image's manifest.
    pub manifest: Vec<u8>,
    /// Its configuration.
    pub config: Vec<u8>,
    /// Its layers, bottom first.
    pub layers: Vec<Vec<u8>>,
}

impl Image {
    /// One whose upper layer has a file `marker` with this text.
    pub fn new(marker: &str) -> Self {
        let tars = [Tar::new().file("base", &"x".repeat(300_000)), Tar::new().file("marker", marker)];
        let Layout { mut blobs, mut index } = Layout::new(&tars.map(|tar| Layer::gzip(&tar)));
        index["manifests"][0]["mediaType"] = json!(MANIFEST);
        let mut last = || blobs.pop().unwrap().1;
        let (manifest, config) = (last(), last());
        let layers = blobs.into_iter().map(|(_, blob)| blob).collect();
        Image { index: index.to_string().into_bytes(), manifest, config, layers }
    }

    /// Gives it another manifest.
    pub fn set_manifest(&mut self, manifest: &Value) {
        self.manifest = manifest.to_string().into_bytes();
        let mut index: Value = serde_json::from_slice(&self.index).unwrap();
        index["manifests"][0]["digest"] = json!(self.digest());
        index["manifests"][0]["size"] = json!(self.manifest.len());
        self.index = index.to_string().into_bytes();
    }

    /// The image's digest.
    pub fn digest(&self) -> String {
        digest(&self.manifest)
    }

    /// The path of a layer.
    pub fn layer_path(&self, layer: usize) -> String {
        format!("/v2/a/b/blobs/{}", digest(&self.layers[layer]))
    }

    /// What a registry that keeps to the protocol answers.
    pub fn reply(&self, head: &str) -> Reply {
        let path = path_of(head);
        let documents =
            [("1".to_owned(), INDEX, &self.index), (digest(&self.index), INDEX, &self.index), (self.digest(), MANIFEST, &self.manifest)];
        let document = documents.iter().find(|(name, ..)| path == format!("/v2/a/b/manifests/{name}"));
        let blob = || self.layers.iter().chain([&self.config]).find(|blob| path == format!("/v2/a/b/blobs/{}", digest(blob)));
        match document {
            Some((_, kind, bytes)) => Reply::new(200, &format!("Content-Type: {kind}\r\n"), bytes),
            None => blob().map_or_else(|| Reply::new(404, "", b"{}"), |blob| Reply::new(200, "", blob)),
        }
    }
}

/// An answer.
#[derive(Clone)]
pub struct Reply {
    status: u16,
    headers: String,
    body: Vec<u8>,
}

impl Reply {
    /// With these headers, each with its end of line, beside its length.
    pub fn new(status: u16, headers: &str, body: &[u8]) -> Self {
        Reply { status, headers: headers.to_owned(), body: body.to_vec() }
    }

    /// Sends it.
    pub fn write(&self, stream: &mut TcpStream) {
        let head =
            format!("HTTP/1.1 {} X\r\nConnection: close\r\nContent-Length: {}\r\n{}\r\n", self.status, self.body.len(), self.headers);
        let _client_left = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&self.body));
    }
}

/// The path that a request asks for.
pub fn path_of(head: &str) -> &str {
    head.split(' ').nth(1).unwrap_or_default()
}

/// The value of a header of a request.
pub fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| line.split_once(": ").filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value))
}

/// A server, which ends with its test.
pub struct Registry {
    /// Where it listens.
    pub port: u16,
    heard: Arc<Mutex<Vec<String>>>,
}

impl Registry {
    /// One on an address of this host that has an image, and another answer where `special` gives one.
    pub fn at(address: &str, image: Image, special: impl Fn(&str) -> Option<Reply> + Send + Sync + 'static) -> Self {
        Registry::with(address, move |head, stream| special(head).unwrap_or_else(|| image.reply(head)).write(stream))
    }

    /// One that has an image and does nothing else.
    pub fn of(image: &Image) -> Self {
        Registry::at("127.0.0.1", image.clone(), |_| None)
    }

    /// One that writes its answers itself.
    pub fn with(address: &str, answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let (port, heard, answer) = (listener.local_addr().unwrap().port(), Arc::default(), Arc::new(answer));
        let all: Arc<Mutex<Vec<String>>> = Arc::clone(&heard);
        thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let (all, answer) = (Arc::clone(&all), Arc::clone(&answer));
                thread::spawn(move || {
                    let mut head = String::new();
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).unwrap_or(0) > 0 {}
                    all.lock().unwrap().push(head.clone());
                    answer(&head, &mut stream);
                });
            }
        });
        Registry { port, heard }
    }

    /// Its image, for a command line.
    pub fn reference(&self) -> String {
        format!("127.0.0.1:{}/a/b:1", self.port)
    }

    /// The heads of the requests that it got.
    pub fn heard(&self) -> Vec<String> {
        self.heard.lock().unwrap().clone()
    }

    /// How many of them ask for a path.
    pub fn count(&self, path: &str) -> usize {
        self.heard().iter().filter(|head| path_of(head) == path).count()
    }

    /// Whether one of them had a password or a token.
    pub fn has_heard_secret(&self) -> bool {
        self.heard().iter().any(|head| header(head, "authorization").is_some())
    }
}
