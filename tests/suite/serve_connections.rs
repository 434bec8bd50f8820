//! The service and its connections: how long it waits for a request, which one closes for another, and that
//! no client can connect to one that ends.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use serde_json::json;

use super::serve::{Service, head, read_answer};
use crate::support::{
    load::Client,
    runner::{eventually, test},
    timeouts::scaled,
};

/// Places of each socket.
const PLACES: usize = 1024;

fn connect(service: &Service) -> TcpStream {
    TcpStream::connect(("127.0.0.1", service.port)).unwrap()
}

/// Connections that have sent the beginning of a request each.
fn half_heads(service: &Service, count: usize) -> Vec<TcpStream> {
    let one = |_| {
        let mut socket = connect(service);
        socket.write_all(b"GET /live HTTP/1.1\r\n").unwrap();
        socket
    };
    (0..count).map(one).collect()
}

/// Whether the service closes a connection within this time.
fn closes(mut socket: &TcpStream, within: Duration) -> bool {
    socket.set_read_timeout(Some(within)).unwrap();
    match socket.read(&mut [0]) {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => false,
        read => read.map_or(true, |length| length == 0),
    }
}

test!(Both, a_head_that_does_not_come_is_not_waited_for_and_an_idle_connection_is, seconds 60);
fn a_head_that_does_not_come_is_not_waited_for_and_an_idle_connection_is() {
    let service = Service::new();
    let mut clients = [Client::at_unix(&service.place.0.join("s"), ""), Client::at_port(service.port, "")];
    clients.iter_mut().for_each(|client| assert_eq!(client.ask("GET", "/live", "").status, 200));
    let silent = connect(&service);
    let begun = Instant::now();
    let half = half_heads(&service, 1).remove(0);
    assert!(closes(&half, scaled(Duration::from_secs(20))) && begun.elapsed() > Duration::from_secs(9), "{:?}", begun.elapsed());
    assert!(!closes(&silent, Duration::from_millis(500)));
    clients.iter_mut().for_each(|client| assert_eq!(client.ask("GET", "/live", "").status, 200));
    service.end();
}

test!(serial Both, who_has_no_key_keeps_no_client_out, seconds 120);
fn who_has_no_key_keeps_no_client_out() {
    let service = Service::new();
    let print = json!({"code": "echo 1", "language": "sh"});
    let mut idle = Client::at_port(service.port, &service.token);
    assert_eq!(idle.run(&print).body["output"], "1\n");
    // A request that goes on.
    let (code, fields) = (json!({"code": "sleep 10; echo done", "language": "sh"}).to_string(), "Content-Type: application/json");
    let asked = head("POST", "/v1/run", &[&format!("Authorization: Bearer {}", service.token), fields], code.len());
    let mut busy = connect(&service);
    busy.write_all(asked.replace("Host: localhost", &format!("Host: localhost:{}", service.port)).as_bytes()).unwrap();
    busy.write_all(code.as_bytes()).unwrap();
    assert!(service.has_runs("running", 1));
    let mut held = Vec::new();
    for round in 0..3 {
        let begun = Instant::now();
        held.push(half_heads(&service, PLACES));
        let mut client = Client::at_port(service.port, &service.token);
        assert_eq!(client.run(&print).body["output"], "1\n", "{round}");
        // It has not waited for the end of those: a head has 10 s.
        assert!(begun.elapsed() < scaled(Duration::from_secs(8)), "{round}: {:?}", begun.elapsed());
    }
    // The first have closed, and so has the idle connection, whose client asks again. The control: the last
    // have their places still.
    assert!(held[0].iter().all(|socket| closes(socket, scaled(Duration::from_secs(2)))));
    assert!(!closes(held[2].last().unwrap(), Duration::from_millis(200)));
    assert!(idle.try_ask("GET", "/live", "").is_err());
    // What has a good key is answered.
    read_answer(busy).ran("done\n");
    drop(held);
    service.end();
}

test!(Both, no_client_connects_to_a_service_that_ends, seconds 60);
fn no_client_connects_to_a_service_that_ends() {
    let service = Service::with("[limits]\ndrain = \"20s\"\n", "");
    let mut known = Client::at_unix(&service.place.0.join("s"), "");
    assert_eq!(known.ask("GET", "/ready", "").status, 200);
    let last = service.begin("import time; time.sleep(4); print('done')");
    assert!(service.has_runs("running", 1));
    let is_refused = || {
        let over_unix = UnixStream::connect(service.place.0.join("s")).map(drop);
        let over_tcp = TcpStream::connect(("127.0.0.1", service.port)).map(drop);
        [over_unix, over_tcp].map(|connected| connected.err().map(|error| error.kind()))
    };
    // The control.
    assert_eq!(is_refused(), [None, None]);
    service.signal("TERM");
    assert!(eventually(scaled(Duration::from_secs(3)), || is_refused() == [Some(ErrorKind::ConnectionRefused); 2]), "{:?}", is_refused());
    // Who was connected before hears that it ends, and what runs is answered.
    assert_eq!(known.ask("GET", "/ready", "").status, 503);
    read_answer(last).ran("done\n");
    service.end();
}
