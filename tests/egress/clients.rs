//! Programs of other make than those of `programs`, each with a resolver, sockets or TLS of
//! its own: GnuTLS, OpenSSL by hand, OpenSSH, Go, Java. Each does what it is there for by the
//! rule, and is refused without; for each refusal there is the rule under which the packet
//! leaves.

use std::process::Command;

use serde_json::json;

use crate::{
    egress::testbed::FILES, egress::testbed::GateRun, egress::testbed::Testbed, egress::testbed::denials, egress::testbed::syn,
    support::runner::test,
};

const INDEX: &str = "pypi.org:443";
const ADDRESS: &str = "203.0.113.10";
/// What else the same programs reach where these rules are given.
const ALL: [&str; 3] = [INDEX, "stray.example:443", "203.0.113.10:443"];

/// How a program ends: its status, and its output where there may be some.
const DONE: &str = "def done(*words, stdin='', **more):
    ended = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=60, env={'PATH': '/usr/bin:/bin', 'HOME': '/tmp', **more})
    return ended.returncode, ended.stdout.strip(), ended.stderr
";

/// By name alone, and the neighbours of that name are refused without a packet.
#[track_caller]
fn refused_elsewhere(testbed: &mut Testbed, ran: &GateRun) {
    let packets = testbed.packets_but_dns();
    assert!(!packets.is_empty() && packets.iter().all(|packet| *packet == syn(ADDRESS, 443)), "{packets:?}");
    let denied = denials(ran);
    for expected in ["dns stray.example no_rule", "connect 203.0.113.10 443 no_rule"] {
        assert!(denied.iter().any(|denied| denied == expected), "{expected}: {denied:?}");
    }
}

test!(Both, wget_fetches_by_name_and_from_nowhere_else, needs [Program("wget")], seconds 90);
fn wget_fetches_by_name_and_from_nowhere_else() {
    let mut testbed = Testbed::new();
    let certificate = testbed.index();
    let script = format!(
        "{DONE}def wget(host, *words): return done('wget', '-q', '-O', '-', '--tries=1', '--timeout=5', '--no-hsts', *words, 'https://' + host + '/data.json')[:2]
say(wget('pypi.org', '--ca-certificate=' + {certificate:?}))
say(*(wget(host, '--no-check-certificate') for host in ('stray.example', '{ADDRESS}')))"
    );
    let got = "(0, '{\"name\": \"demo\"}')";
    let ran = testbed.run(&[INDEX], &script);
    // 4: a failure of the network.
    assert_eq!(ran.output, format!("{got}\n(4, '') (4, '')\n"), "{ran:?}");
    refused_elsewhere(&mut testbed, &ran);
    assert_eq!(testbed.packets_but_dns().len(), 1);
    assert_eq!(testbed.run(&ALL, &script).output, format!("{got}\n{got} {got}\n"));
}

test!(Both, openssl_speaks_to_the_named_server_alone, seconds 90);
fn openssl_speaks_to_the_named_server_alone() {
    let mut testbed = Testbed::new();
    let certificate = testbed.index();
    let script = format!(
        "{DONE}def ask(to, *words):
    ended = done('openssl', 's_client', '-quiet', '-connect', to + ':443', *words, stdin='GET /data.json HTTP/1.1\\r\\nHost: pypi.org\\r\\nConnection: close\\r\\n\\r\\n')
    return 'demo' in ended[1]
say(ask('pypi.org', '-servername', 'pypi.org', '-CAfile', {certificate:?}, '-verify_return_error'))
say(ask('pypi.org', '-servername', 'stray.example'), ask('pypi.org', '-noservername'))
say(ask('{ADDRESS}', '-servername', 'pypi.org'), ask('stray.example', '-servername', 'pypi.org'))"
    );
    let ran = testbed.run(&[INDEX], &script);
    assert_eq!(ran.output, "True\nFalse False\nFalse False\n", "{ran:?}");
    refused_elsewhere(&mut testbed, &ran);
    assert_eq!(testbed.packets_but_dns().len(), 3, "three by the name, of which two were cut off in their hello");
    let denied = denials(&ran);
    for reason in ["sni_mismatch", "sni_missing"] {
        assert!(denied.contains(&format!("tls pypi.org {ADDRESS} 443 {reason}")), "{reason}: {denied:?}");
    }
    // A rule with an address, or for any TCP protocol, asks for no name.
    let open = testbed.run(&["pypi.org:443/tcp", "stray.example:443/tcp", "203.0.113.10:443"], &script);
    assert_eq!(open.output, "True\nTrue True\nTrue True\n", "{open:?}");
}

test!(Both, ssh_hears_the_server_first_and_reaches_no_other, needs [Program("ssh")], seconds 90);
/// The other side sends a greeting and nothing else; the client gives up.
fn ssh_hears_the_server_first_and_reaches_no_other() {
    let mut testbed = Testbed::new();
    testbed.listen("ssh", &[22]);
    testbed.zone(json!({"git.internal": {"a": [["10.0.5.7"]]}, "other.internal": {"a": [["10.0.6.7"]]}}));
    let script = format!(
        "{DONE}def ssh(host):
    ended = done('ssh', '-v', '-F', '/dev/null', '-o', 'BatchMode=yes', '-o', 'ConnectTimeout=10', '-o', 'UserKnownHostsFile=/dev/null', 'git@' + host)
    return ended[0], 'remote software version greeting' in ended[2]
say(*map(ssh, ('git.internal', '10.0.5.7', 'other.internal', '10.0.6.7')))"
    );
    let (heard, nothing) = ("(255, True)", "(255, False)");
    let ran = testbed.run(&["git.internal:22/tcp"], &script);
    assert_eq!(ran.output, format!("{heard} {nothing} {nothing} {nothing}\n"), "{ran:?}");
    assert_eq!(testbed.packets_but_dns(), [syn("10.0.5.7", 22)]);
    let said = testbed.heard(22);
    assert!(said.len() == 1 && said[0].starts_with("SSH-2.0-OpenSSH"), "{said:?}");
    let denied = denials(&ran);
    for expected in ["connect 10.0.5.7 22 no_rule", "dns other.internal no_rule", "connect 10.0.6.7 22 no_rule"] {
        assert!(denied.iter().any(|denied| denied == expected), "{expected}: {denied:?}");
    }
    let open = testbed.run(&["git.internal:22/tcp", "other.internal:22/tcp", "10.0.5.7:22", "10.0.6.7:22"], &script);
    assert_eq!(open.output, format!("{heard} {heard} {heard} {heard}\n"), "{open:?}");
    // A name alone stands for TLS and HTTP, which SSH is not: the peer is reached, and told nothing.
    testbed.clear();
    let ran = testbed.run(&["git.internal:22"], &script);
    assert!(
        denials(&ran).iter().any(|denied| denied.starts_with("tls git.internal") || denied.contains("git.internal 10.0.5.7 22")),
        "{ran:?}"
    );
    assert_eq!(testbed.heard(22).len(), 1);
    assert!(testbed.heard(22).iter().all(|said| !said.contains("SSH")), "{:?}", testbed.heard(22));
}

test!(Both, a_program_in_go_fetches_by_name_and_from_nowhere_else, needs [Program("gron")], seconds 90);
/// gron, of which Debian has a program: it reads JSON from an URL.
fn a_program_in_go_fetches_by_name_and_from_nowhere_else() {
    let mut testbed = Testbed::new();
    let certificate = testbed.index();
    let script = format!(
        "{DONE}def gron(host, *words): return done('gron', '--monochrome', *words, 'https://' + host + '/data.json', SSL_CERT_FILE={certificate:?})[:2]
say(gron('pypi.org'))
say(*(gron(host, '--insecure') for host in ('stray.example', '{ADDRESS}')))"
    );
    let got = r#"(0, 'json = {};\njson.name = "demo";')"#;
    let ran = testbed.run(&[INDEX], &script);
    // 4: the URL could not be fetched.
    assert_eq!(ran.output, format!("{got}\n(4, '') (4, '')\n"), "{ran:?}");
    refused_elsewhere(&mut testbed, &ran);
    assert_eq!(testbed.packets_but_dns().len(), 1);
    assert_eq!(testbed.run(&ALL, &script).output, format!("{got}\n{got} {got}\n"));
}

const FETCH: &str = r#"import java.io.FileInputStream;
import java.net.*;
import java.net.http.*;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import javax.net.ssl.*;

class Fetch {
    public static void main(String[] words) throws Exception {
        var keys = KeyStore.getInstance(KeyStore.getDefaultType());
        keys.load(null, null);
        var certificate = CertificateFactory.getInstance("X.509").generateCertificate(new FileInputStream(words[0]));
        keys.setCertificateEntry("index", certificate);
        var trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        trust.init(keys);
        var context = SSLContext.getInstance("TLS");
        context.init(null, trust.getTrustManagers(), null);
        // Both of its clients: the one with streams, and the one with channels.
        var client = HttpClient.newBuilder().sslContext(context).build();
        for (int at = 1; at < words.length; at++) {
            String first, second;
            try {
                var connection = (HttpsURLConnection) new URL(words[at]).openConnection();
                connection.setSSLSocketFactory(context.getSocketFactory());
                first = "" + connection.getResponseCode();
            } catch (java.io.IOException error) {
                first = error.getClass().getSimpleName();
            }
            try {
                var request = HttpRequest.newBuilder(URI.create(words[at])).build();
                second = "" + client.send(request, HttpResponse.BodyHandlers.discarding()).statusCode();
            } catch (java.io.IOException error) {
                second = error.getClass().getSimpleName();
            }
            System.out.println(first + " " + second);
        }
        System.exit(0);
    }
}
"#;

test!(Both, a_program_in_java_fetches_by_name_and_from_nowhere_else, needs [Program("javac")], seconds 90);
fn a_program_in_java_fetches_by_name_and_from_nowhere_else() {
    let mut testbed = Testbed::new();
    let certificate = testbed.index();
    let source = testbed.directory().join("Fetch.java");
    std::fs::write(&source, FETCH).unwrap();
    let compiled = Command::new("javac").arg("-d").arg(testbed.directory()).arg(&source).output().unwrap();
    assert!(compiled.status.success(), "{compiled:?}");
    let script = format!(
        "{DONE}ended = done('java', '-XX:TieredStopAtLevel=1', '-cp', '{FILES}', 'Fetch', {certificate:?}, 'https://pypi.org/data.json', 'https://stray.example/', 'https://{ADDRESS}/')
say(ended[1], ended[2] if ended[0] else '')"
    );
    let ran = testbed.run(&[INDEX], &script);
    assert_eq!(ran.output, "200 200\nUnknownHostException ConnectException\nConnectException ConnectException \n", "{ran:?}");
    refused_elsewhere(&mut testbed, &ran);
    // Reached by the rules, the others' certificate is the index's, not theirs.
    let open = testbed.run(&ALL, &script);
    assert_eq!(
        open.output, "200 200\nSSLHandshakeException SSLHandshakeException\nSSLHandshakeException SSLHandshakeException \n",
        "{open:?}"
    );
}
