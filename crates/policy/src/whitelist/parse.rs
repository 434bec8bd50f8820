//! One line of a whitelist: `TARGET:PORTS`, and for a name perhaps `/tcp`.
//!
//! A wrong line is refused with the reason and, where it can be guessed, the line that was
//! meant.

use std::net::IpAddr;

use super::{Name, NameFault, Network, Ports, PortsFault, Protocol, Rule, SYNTHETIC, Target};
use crate::{
    check::Checked,
    diagnostic::{Diagnostic, quote},
};

const SHAPE: &str = "such as \"pypi.org:443\", \"*.example.org:443\", \"10.0.5.0/24:8000-8100\" or \"[2001:db8::/48]:443\"";

/// Reads a rule.
pub(crate) fn rule(text: &str) -> Checked<Rule> {
    let refuse = |label: &str| Diagnostic::new(format!("{} is not a rule of a whitelist", quote(text)), label);
    // Checked first, so that the later messages can quote the text.
    if text.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(refuse("holds a space or a control character").help(SHAPE));
    }
    if text.contains("://") || text.contains('@') {
        return Err(refuse("URLs are not rules").help(meant_by_url(text).unwrap_or_else(|| SHAPE.to_owned())));
    }
    if matches!(text.split(':').next(), Some("*" | "*." | "")) && !text.is_empty() {
        return Err(refuse("the target is missing").help("every address is \"0.0.0.0/0\" and \"[::/0]\"; every name cannot be allowed"));
    }
    let (target, ports) = split(text).map_err(|(label, help)| refuse(label).help(help))?;
    let (ports, suffix) = ports.split_once('/').map_or((ports, None), |(ports, suffix)| (ports, Some(suffix)));
    let target = if target.starts_with('[') || target.contains('/') || target.parse::<IpAddr>().is_ok() {
        Target::Network(network(target).map_err(|(label, help)| refuse(&label).help(help))?)
    } else {
        named(target).map_err(|(label, help)| match help {
            Some(help) => refuse(&label).help(help),
            None => refuse(&label),
        })?
    };
    let protocol = protocol(&target, ports, suffix).map_err(|(label, help)| refuse(label).help(help))?;
    let ports = Ports::new(ports).map_err(|fault| {
        let diagnostic = refuse(&fault.to_string());
        match fault {
            PortsFault::Dns => diagnostic.help("leave port 53 out: \"1-52,54-65535\" is every other"),
            _ => diagnostic.help(SHAPE),
        }
    })?;
    Ok(Rule { target, ports, protocol })
}

/// The rule for the peer of a URL whose host is a name.
fn meant_by_url(text: &str) -> Option<String> {
    let (scheme, rest) = text.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?.rsplit('@').next()?;
    let (host, port) = authority.split_once(':').unwrap_or((authority, if scheme == "http" { "80" } else { "443" }));
    Name::new(host).ok().filter(|_| Ports::new(port).is_ok())?;
    Some(format!("write \"{host}:{port}\""))
}

type Why<T> = Result<T, (&'static str, &'static str)>;

/// Target and ports; brackets around IPv6, as in a URL.
fn split(text: &str) -> Why<(&str, &str)> {
    if text.starts_with('[') {
        let (target, rest) = text.split_once(']').ok_or(("the bracket is not closed", SHAPE))?;
        let ports = rest.strip_prefix(':').ok_or(match rest.starts_with('/') {
            true => ("the prefix stands outside the brackets", "write \"[2001:db8::/48]:443\""),
            false => ("the port is missing", SHAPE),
        })?;
        // The opening bracket stays, as the mark of an address.
        return Ok((target, ports));
    }
    let (target, ports) = text.rsplit_once(':').ok_or(("the port is missing", SHAPE))?;
    if target.contains(':') {
        return Err(("an IPv6 address needs brackets", "write \"[2001:db8::/48]:443\""));
    }
    if target.is_empty() {
        return Err(("the peer is missing", SHAPE));
    }
    Ok((target, ports))
}

type Said<H> = (String, H);

fn network(target: &str) -> Result<Network, Said<String>> {
    let bracketed = target.strip_prefix('[');
    let text = bracketed.unwrap_or(target);
    let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
    let parsed: IpAddr = address.parse().map_err(|_| {
        let label = if Name::new(address) == Err(NameFault::Address) {
            format!("{} could be read as several addresses", quote(address))
        } else {
            format!("{} is not an address", quote(address))
        };
        (label, String::from("four decimal numbers without leading zeros, or an IPv6 address in brackets; a name takes no prefix"))
    })?;
    if parsed.is_ipv6() != bracketed.is_some() {
        return Err((String::from("brackets belong to IPv6, and only to it"), format!("write \"{parsed}:443\" without them")));
    }
    // A program's IPv6 socket reaches it as the IPv4 address that it is.
    if parsed.to_canonical() != parsed {
        let label = String::from("an IPv4 address written as IPv6");
        return Err((label, format!("write \"{}:443\"", parsed.to_canonical())));
    }
    let most = if parsed.is_ipv6() { 128 } else { 32 };
    let prefix = match prefix {
        None => most,
        Some(digits) => {
            let plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && (digits.len() == 1 || !digits.starts_with('0'));
            digits
                .parse::<u8>()
                .ok()
                .filter(|prefix| plain && *prefix <= most)
                .ok_or_else(|| (format!("{} is not a prefix", quote(digits)), format!("a prefix is a number from 0 to {most}")))?
        }
    };
    let around = Network::around(parsed, prefix).unwrap_or(Network::host(parsed));
    if around.address() != parsed {
        let (host, net) = (Target::Network(Network::host(parsed)), Target::Network(around));
        return Err((
            format!("{} has bits beyond its prefix", quote(text)),
            format!("write \"{host}\" for the one host, or \"{net}\" for the network"),
        ));
    }
    if around.is_within(&SYNTHETIC) {
        return Err((
            format!("addresses of {SYNTHETIC} stand for names inside a sandbox"),
            String::from("name the peer instead, by an entry of /etc/hosts on the host if nothing else names it"),
        ));
    }
    Ok(around)
}

fn named(target: &str) -> Result<Target, Said<Option<String>>> {
    let (wildcard, text) = target.strip_prefix("*.").map_or((false, target), |rest| (true, rest));
    if text.contains('*') {
        let help = String::from("write \"*.example.org:443\", which stands for one label more");
        return Err((String::from("a wildcard is the whole first label, once"), Some(help)));
    }
    let name = to_ascii(text)?;
    if name.is_within("localhost") {
        let help =
            String::from("to reach a service of the host, name it in the host's /etc/hosts and allow that name and \"127.0.0.1:PORT\"");
        return Err((String::from("inside a sandbox `localhost` is the sandbox itself"), Some(help)));
    }
    if !wildcard {
        return Ok(Target::Name(name));
    }
    if name.parent().is_none() {
        let help = format!("name what lies below it, such as \"*.example.{name}:443\"");
        return Err((format!("`*.{name}` would open every name of a whole top-level domain"), Some(help)));
    }
    Ok(Target::Wildcard(name))
}

/// The name as DNS and TLS carry it. International names are converted (UTS 46), but only
/// from the one spelling that converts back to itself: two that look alike stay two.
fn to_ascii(text: &str) -> Result<Name, Said<Option<String>>> {
    let wrong = |fault: NameFault| (fault.to_string(), None);
    let plain = text.strip_suffix('.').unwrap_or(text);
    let international =
        !plain.is_ascii() || plain.split('.').any(|label| label.get(..4).is_some_and(|head| head.eq_ignore_ascii_case("xn--")));
    if !international {
        return Name::new(plain).map_err(wrong);
    }
    let unusable = || (String::from("not a usable international name"), None);
    let ascii = idna::domain_to_ascii_strict(plain).map_err(|_| unusable())?;
    let (shown, valid) = idna::domain_to_unicode(&ascii);
    valid.map_err(|_| unusable())?;
    if plain.is_ascii() {
        return if ascii.eq_ignore_ascii_case(plain) { Name::new(&ascii).map_err(wrong) } else { Err(unusable()) };
    }
    if shown != plain.to_lowercase() {
        return Err((String::from("a spelling that stands for another name"), Some(format!("write {}", quote(&shown)))));
    }
    Name::new(&ascii).map_err(wrong)
}

fn protocol(target: &Target, ports: &str, suffix: Option<&str>) -> Why<Protocol> {
    let network = matches!(target, Target::Network(_));
    match suffix {
        Some("udp") => Err(("UDP is not supported", "TCP is the only protocol that can leave; names are resolved without a rule")),
        Some(digits) if network && !ports.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            Err(("the prefix stands behind the port", "write \"10.0.5.0/24:443\""))
        }
        Some("tcp") if network => Err(("`/tcp` belongs to names", "leave it out: connections to an address are never inspected")),
        Some("tcp") => Ok(Protocol::AnyTcp),
        Some(_) => Err(("an unknown suffix", "the only one is `/tcp`, for peers that speak neither TLS nor HTTP")),
        None if network => Ok(Protocol::AnyTcp),
        None => Ok(Protocol::TlsOrHttp),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    /// A refusal as one text.
    fn said(text: &str) -> String {
        match rule(text) {
            Ok(rule) => panic!("{text:?} became {rule}"),
            Err(diagnostic) => format!("{}; {}; {}", diagnostic.title, diagnostic.label, diagnostic.help.unwrap_or_default()),
        }
    }

    #[test]
    fn good_rules_have_one_spelling() {
        for (text, shown) in [
            ("pypi.org:443", "pypi.org:443"),
            ("PyPI.org.:443", "pypi.org:443"),
            ("*.pythonhosted.org:443", "*.pythonhosted.org:443"),
            ("api:8443", "api:8443"),
            ("api.internal:443,80,8000-8100", "api.internal:80,443,8000-8100"),
            ("api.internal:5432/tcp", "api.internal:5432/tcp"),
            ("10.0.5.0/24:443", "10.0.5.0/24:443"),
            ("10.0.5.7:443", "10.0.5.7:443"),
            ("10.0.5.7/32:443", "10.0.5.7:443"),
            ("0.0.0.0/0:443", "0.0.0.0/0:443"),
            ("[2001:db8::/48]:5432", "[2001:db8::/48]:5432"),
            ("[2001:DB8:0:0::1]:443", "[2001:db8::1]:443"),
            ("[::/0]:443", "[::/0]:443"),
            ("127.0.0.1:8080", "127.0.0.1:8080"),
            ("bücher.example:443", "xn--bcher-kva.example:443"),
            ("BÜCHER.example:443", "xn--bcher-kva.example:443"),
            ("xn--bcher-kva.example:443", "xn--bcher-kva.example:443"),
            ("*.bücher.example:443", "*.xn--bcher-kva.example:443"),
            ("a_b.example.org:443", "a_b.example.org:443"),
        ] {
            let rule = rule(text).unwrap_or_else(|diagnostic| panic!("{text}: {} ({})", diagnostic.title, diagnostic.label));
            assert_eq!(rule.to_string(), shown);
            assert_eq!(rule.to_string().parse::<Rule>().unwrap(), rule, "{text}");
        }
    }

    #[test]
    fn only_a_name_without_suffix_is_held_to_its_name() {
        assert_eq!(rule("a.example:443").unwrap().protocol, Protocol::TlsOrHttp);
        assert_eq!(rule("a.example:443/tcp").unwrap().protocol, Protocol::AnyTcp);
        assert_eq!(rule("10.0.0.1:443").unwrap().protocol, Protocol::AnyTcp);
    }

    #[test]
    fn ambiguous_rules_are_refused_with_a_remedy() {
        for (text, label, help) in [
            ("", "port is missing", "such as"),
            ("*", "target is missing", "0.0.0.0/0"),
            ("*:443", "target is missing", "0.0.0.0/0"),
            (":443", "target is missing", ""),
            ("pypi.org", "port is missing", "such as"),
            ("pypi.org:", "a port is missing", "such as"),
            ("pypi.org:0", "1 to 65535", ""),
            ("pypi.org:90-80", "smaller port to the larger", ""),
            ("pypi.org:53", "own resolver", "1-52,54-65535"),
            ("10.0.0.0/8:1-65535", "own resolver", "1-52,54-65535"),
            ("pypi.org:*", "1 to 65535", ""),
            ("pypi.org:https", "1 to 65535", ""),
            ("https://pypi.org:8443/simple?x=1", "URLs are not rules", "write \"pypi.org:8443\""),
            ("https://pypi.org", "URLs are not rules", "write \"pypi.org:443\""),
            ("http://me@pypi.org/", "URLs are not rules", "write \"pypi.org:80\""),
            ("https://[::1]:443/", "URLs are not rules", "such as \"pypi.org:443\""),
            ("me@pypi.org:443", "URLs are not rules", "such as"),
            ("pypi.org :443", "space or a control", ""),
            ("pypi.org:443\n", "space or a control", ""),
            ("pypi\0.org:443", "space or a control", ""),
            ("pypi.org%00.evil:443", "letters, digits", ""),
            ("pypi.org:443/udp", "UDP is not supported", "TCP is the only"),
            ("10.0.0.1:53/udp", "UDP is not supported", ""),
            ("pypi.org:443/TCP", "unknown suffix", "`/tcp`"),
            ("pypi.org:443/", "unknown suffix", ""),
            ("10.0.0.1:443/tcp", "belongs to names", "leave it out"),
            ("10.0.5.0:443/24", "behind the port", "10.0.5.0/24:443"),
            ("*.com:443", "whole top-level domain", "*.example.com:443"),
            ("*.*.org:443", "once", "*.example.org"),
            ("a*.example.org:443", "once", ""),
            ("a.*.org:443", "once", ""),
            ("10.0.5.7/24:443", "bits beyond its prefix", "\"10.0.5.7\" for the one host, or \"10.0.5.0/24\""),
            ("[2001:db8::1/48]:443", "bits beyond its prefix", "\"[2001:db8::/48]\""),
            ("10.0.0.0/33:443", "not a prefix", "0 to 32"),
            ("10.0.0.0/08:443", "not a prefix", ""),
            ("10.0.0.0/:443", "not a prefix", ""),
            ("[2001:db8::/129]:443", "not a prefix", "0 to 128"),
            ("2001:db8::1:443", "needs brackets", "[2001:db8::/48]:443"),
            ("[2001:db8::]/48:443", "outside the brackets", ""),
            ("[2001:db8::1:443", "not closed", ""),
            ("[2001:db8::1]443", "port is missing", ""),
            ("[10.0.0.1]:443", "only to it", "10.0.0.1:443"),
            ("[pypi.org]:443", "not an address", ""),
            ("[fe80::1%eth0]:443", "not an address", ""),
            ("[::ffff:10.0.0.1]:443", "written as IPv6", "\"10.0.0.1:443\""),
            ("[::ffff:a00:1]:443", "written as IPv6", "\"10.0.0.1:443\""),
            ("pypi.org/24:443", "not an address", ""),
            ("2130706433:443", "last label is a number", ""),
            ("0x7f000001:443", "last label is a number", ""),
            ("0177.0.0.1:443", "last label is a number", ""),
            ("127.1:443", "last label is a number", ""),
            ("127.1/32:443", "several addresses", ""),
            ("010.0.0.0/8:443", "several addresses", ""),
            ("localhost:8080", "the sandbox itself", "127.0.0.1:PORT"),
            ("a.LOCALHOST.:8080", "the sandbox itself", ""),
            ("198.18.0.5:443", "stand for names", "name the peer"),
            ("198.19.255.253:443", "stand for names", ""),
            ("198.18.0.0/15:443", "stand for names", ""),
            ("pypi..org:443", "label is empty", ""),
            ("-a.org:443", "begin or end", ""),
            ("ｐypi.org:443", "stands for another name", "`pypi.org`"),
            ("xn--a.example:443", "international", ""),
            ("xn--pypi-.example:443", "", ""),
            ("pypi\u{200b}.org:443", "", ""),
            ("pypi。org:443", "stands for another name", "`pypi.org`"),
        ] {
            let said = said(text);
            assert!(said.contains(label) && said.contains(help), "{text:?}: {said}");
        }
    }

    #[test]
    fn a_network_around_the_synthetic_one_is_no_mistake() {
        assert!(rule("198.0.0.0/8:443").is_ok() && rule("198.17.255.255:443").is_ok() && rule("198.20.0.0/16:443").is_ok());
    }
}
