//! A proof as one page that needs nothing else: no script, no picture, no other file.
//!
//! Every text from elsewhere is escaped: names of hosts and policies, paths, and
//! what was seen.

use std::fmt::{self, Write};

use stockade_protocol::text::is_hidden;

use crate::{Class, Finding, Proof, State};

/// The page.
pub fn html(proof: &Proof) -> String {
    let mut page = String::new();
    // Writing to a String cannot fail.
    let _never = write_page(&mut page, proof);
    page
}

/// The page of a proof that has not ended, or will not: it proves nothing.
pub fn unfinished(why: Option<&str>) -> String {
    let why = why.map_or_else(
        || String::from("The proof is still running, or was ended before it finished."),
        |why| format!("It was broken off: {}", Escaped(why)),
    );
    format!(
        "{}<h1>A proof that has not ended</h1>\n<p class=\"verdict not-proven\">nothing is proven</p>\n<p>{why}</p>\n</body>\n</html>\n",
        head("A proof that has not ended: nothing is proven")
    )
}

/// The page up to its first heading. The title is a constant or escaped.
fn head(title: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
    )
}

const STYLE: &str = include_str!("html.css");

fn write_page(out: &mut String, proof: &Proof) -> fmt::Result {
    let policy = Escaped(&proof.policy.name);
    let (verdict, class) = verdict(proof);
    out.push_str(&head(&format!("Policy {policy}: {verdict}")));
    write!(out, "<h1>Policy <q>{policy}</q> under attack</h1>\n<p class=\"verdict {class}\">{verdict}</p>\n")?;
    let (count, distinct) = (proof.count, proof.distinct);
    writeln!(
        out,
        "<p>{} attacks were tried from inside real sandboxes, {} of them more than a system call&#8217;s number. {} held, {} got through, {} could not be proven. \
         An attack counts as held only if it failed exactly as stated and its control, the same probe with one restriction lifted, succeeded.</p>",
        count.tried, distinct.tried, count.held, count.breaches, count.not_proven
    )?;
    facts(out, proof)?;
    summary(out, proof)?;
    let is_open = |finding: &&Finding| matches!(finding.state, State::Breach | State::NotProven);
    if proof.findings.iter().any(|finding| is_open(&finding)) {
        writeln!(out, "<h2>To be looked at</h2>")?;
        table(out, proof.findings.iter().filter(is_open))?;
    }
    for class in Class::ALL {
        writeln!(out, "<h2 id=\"{}\">{}</h2>", anchor(class), capital(class.title()))?;
        table(out, proof.of(class))?;
    }
    receipt(out, proof)?;
    write!(out, "</body>\n</html>\n")
}

fn verdict(proof: &Proof) -> (&'static str, &'static str) {
    match (proof.count.breaches, proof.count.not_proven) {
        (0, 0) => ("everything held", "held"),
        (0, _) => ("nothing got through, but not everything is proven", "not-proven"),
        _ => ("something got through", "breach"),
    }
}

fn facts(out: &mut String, proof: &Proof) -> fmt::Result {
    let (policy, receipt) = (&proof.policy, &proof.receipt);
    writeln!(out, "<table class=\"facts\">")?;
    let mut row = |name: &str, value: &str| writeln!(out, "<tr><th>{name}</th><td>{}</td></tr>", Escaped(value));
    row("Host", &proof.host)?;
    row("Kernel", &receipt.kernel)?;
    row("Launched by", &format!("uid {}, {}", proof.uid, receipt.mode))?;
    row("Policy", &format!("{} ({}): {}", policy.name, policy.origin, proof.description))?;
    row("Its SHA-256", &policy.sha256)?;
    row("Without", &if receipt.degraded.is_empty() { String::from("no layer is missing") } else { receipt.degraded.join(", ") })?;
    row("Begun and ended", &format!("{} to {} (UTC, {} ms)", proof.begun, proof.ended, proof.duration_ms))?;
    row("Program", &format!("stockade {}, SHA-256 {}", proof.version, proof.program_sha256.as_deref().unwrap_or("not known")))?;
    for raised in &proof.limits_raised {
        row("Raised for the attacks", &raised.words())?;
    }
    if !proof.uncovered.is_empty() {
        row("No attack tries", &proof.uncovered.join(", "))?;
    }
    let doctor: Vec<String> = proof.doctor.iter().map(|(feature, state)| format!("{feature}: {state}")).collect();
    row("Doctor", &doctor.join(", "))?;
    if let Some(audit) = &proof.audit {
        let place = audit.seq.map_or_else(|| audit.failure.clone().unwrap_or_default(), |seq| format!("record {seq}"));
        row("Audit log", &format!("{place} (run {})", audit.run))?;
    }
    writeln!(out, "</table>")
}

fn summary(out: &mut String, proof: &Proof) -> fmt::Result {
    writeln!(
        out,
        "<table>\n<tr><th>Class</th><th>Tried</th><th>Held</th><th>Breaches</th><th>Not proven</th><th>Allowed by policy</th><th>Not available here</th></tr>"
    )?;
    for class in Class::ALL {
        let count = proof.count_of(class);
        let mark = if count.breaches > 0 {
            "breach"
        } else if count.not_proven > 0 {
            "not-proven"
        } else {
            "held"
        };
        write!(out, "<tr class=\"{mark}\"><td><a href=\"#{}\">{}</a></td>", anchor(class), capital(class.title()))?;
        for number in [count.tried, count.held, count.breaches, count.not_proven, count.allowed, count.absent] {
            write!(out, "<td class=\"number\">{number}</td>")?;
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</table>")
}

fn table<'a>(out: &mut String, findings: impl Iterator<Item = &'a Finding>) -> fmt::Result {
    writeln!(
        out,
        "<table>\n<tr><th>Attack</th><th>Outcome</th><th>Expected</th><th>Observation</th><th>Control</th><th>Stopped by</th></tr>"
    )?;
    for finding in findings {
        let mark = match finding.state {
            State::Breach => "breach",
            State::NotProven => "not-proven",
            State::Held => "held",
            State::Allowed | State::Absent => "apart",
        };
        write!(out, "<tr class=\"{mark}\"><td><b>{}</b><br>{}</td>", Escaped(&finding.attack), Escaped(&finding.tried))?;
        write!(out, "<td>{}", finding.state.title())?;
        if let Some(advice) = &finding.advice {
            write!(out, "<br><i>{}</i>", Escaped(advice))?;
        }
        write!(out, "</td>")?;
        for text in [&finding.expected, &finding.seen, &finding.control, &finding.layers.join(", ")] {
            write!(out, "<td>{}</td>", Escaped(text))?;
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</table>")
}

fn receipt(out: &mut String, proof: &Proof) -> fmt::Result {
    writeln!(
        out,
        "<h2>Receipt</h2>\n<p>What was in force in the sandbox, and how that is known.</p>\n<table>\n<tr><th>Layer</th><th>Known by</th><th>Found</th></tr>"
    )?;
    for layer in &proof.receipt.layers {
        let known = match layer.known {
            stockade_protocol::Known::ReadBack => "reading it back",
            stockade_protocol::Known::Probed => "trying",
            stockade_protocol::Known::Applied => "setting it",
            stockade_protocol::Known::Degraded => "missing",
        };
        writeln!(out, "<tr><td>{}</td><td>{known}</td><td>{}</td></tr>", Escaped(layer.layer), Escaped(&layer.detail))?;
    }
    writeln!(out, "</table>\n<p>SHA-256 of the plan: {}</p>", Escaped(&proof.receipt.plan_sha256))
}

fn anchor(class: Class) -> String {
    class.title().replace(' ', "-")
}

fn capital(title: &str) -> String {
    let mut letters = title.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

/// Text that may hold anything, as text of a page. Control characters are made visible.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                letter if is_hidden(letter) => write!(f, "{}", letter.escape_default())?,
                letter => f.write_char(letter)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Escaped;

    #[test]
    fn nothing_that_was_seen_becomes_part_of_the_page() {
        let hostile = "<script>alert('x')</script> \"&\x1b]0;\u{202e}\u{2028}";
        let escaped = Escaped(hostile).to_string();
        assert_eq!(escaped, "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &quot;&amp;\\u{1b}]0;\\u{202e}\\u{2028}");
    }
}
