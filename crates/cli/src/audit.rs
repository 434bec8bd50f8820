//! `stockade audit`: verify, tail, show, query, rotate.
//!
//! Log lines are untrusted: they are printed as printable ASCII. Root reads with the caller's
//! rights. Nothing is written to a log, but by `rotate`.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, BufRead, BufReader, Read, Seek},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Context, bail};
use rustix::fs::OFlags;
use serde_json::Value;
use stockade_audit::{Anchor, AnchorSink, Findings, HEAD, MAX_LINE_LEN, Verifier, files, text};
use stockade_protocol::text::{escape_json, escape_line, is_not_ascii};

use crate::{
    ExitCode, USAGE_ERROR,
    args::{Audit, Filter, Verify},
    failed_with,
    output::{Progress, print_text, warn},
};

/// How often a followed log is read.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

pub(crate) fn run(command: &Audit) -> anyhow::Result<ExitCode> {
    if let Audit::Rotate { keep_days } = command {
        return rotate(*keep_days);
    }
    let done = stockade_engine::with_callers_rights(|| match command {
        Audit::Verify(asked) => verify(asked),
        Audit::Tail { log, number, follow, json } => tail(&place(log.as_deref())?, *number, *follow, *json),
        Audit::Show { log, id } => show(&place(log.as_deref())?, id),
        Audit::Query(filter) => query(filter),
        Audit::Rotate { .. } => Ok(ExitCode::SUCCESS),
    })?;
    Ok(done.unwrap_or_else(|error| failed_with(USAGE_ERROR, &error)))
}

/// The one command that writes to a log, with the launcher's own rights.
fn rotate(keep_days: Option<u32>) -> anyhow::Result<ExitCode> {
    let keep = keep_days.map(|days| Duration::from_secs(u64::from(days) * 24 * 60 * 60));
    let rotated = stockade_engine::audit::rotate(keep)?;
    for path in &rotated.removed {
        print_text(&format!("removed {}", path.display()))?;
    }
    match rotated.appended {
        Some(appended) => print_text(&format!("{} is written to from now on", appended.file.display()))?,
        None => {
            let place = stockade_engine::audit::own_directory()?.unwrap_or_default();
            print_text(&format!("{}: there is no audit log yet", place.display()))?;
            // Root's timer may be on before the first run is.
            if !rustix::process::geteuid().is_root() {
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The log's directory.
fn place(log: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(log) = log {
        return Ok(log.to_path_buf());
    }
    let own = stockade_engine::audit::own_directory()?
        .context("neither XDG_STATE_HOME nor HOME is set, so the log's directory is unknown; name it with --log")?;
    if !own.exists() && !rustix::process::geteuid().is_root() {
        bail!("{}: this user has no audit log yet; root's log: --log /var/log/stockade", own.display());
    }
    Ok(own)
}

/// Opens a file of a log's directory. The log's owner may be hostile: a fifo must not block
/// the reader, and a symlink must not lead to another file.
fn open(path: &Path) -> anyhow::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path);
    let file = opened.with_context(|| format!("open {}", path.display()))?;
    if !file.metadata()?.is_file() {
        bail!("{} is not a regular file", path.display());
    }
    Ok(file)
}

fn verify(asked: &Verify) -> anyhow::Result<ExitCode> {
    let path = place(asked.path.as_deref().or(asked.log.as_deref()))?;
    let metadata = std::fs::metadata(&path).with_context(|| format!("look at {}", path.display()))?;
    let is_directory = metadata.is_dir();
    let mut verifier = match asked.after.as_deref() {
        Some(hash) => Verifier::new(Some(hash)),
        // One file of many may begin anywhere.
        None if !is_directory => Verifier::new(None),
        None => Verifier::from_beginning(),
    };
    if let Some(chain) = &asked.chain {
        verifier.want_chain(chain);
    }
    if let Some(anchors) = &asked.anchors {
        verifier.expect(read_anchors(anchors)?);
    }
    let all = if is_directory { files(&path)? } else { vec![path.clone()] };
    if all.is_empty() {
        bail!("{} holds no audit log", path.display());
    }
    let mut progress = Progress::new("files verified");
    for (index, file) in all.iter().enumerate() {
        progress.at(index, all.len());
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let input = if is_directory { open(file)? } else { File::open(file).with_context(|| format!("open {}", file.display()))? };
        verifier.file(&name, input, index + 1 == all.len()).with_context(|| format!("read {}", file.display()))?;
    }
    drop(progress);
    let findings = verifier.finish();
    print_text(&describe(&findings, asked, metadata.uid()))?;
    let is_wrong = !findings.problems.is_empty() || asked.require_anchor && findings.anchored == 0;
    Ok(if is_wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The longest document of results that is read as a whole.
const MAX_RESULTS_LEN: usize = 64 << 20;

fn read_anchors(path: &Path) -> anyhow::Result<Vec<Anchor>> {
    let input: Box<dyn Read> = if path == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(path).with_context(|| format!("open the anchors {}", path.display()))?)
    };
    let (mut anchors, mut whole) = (Vec::new(), Vec::new());
    each_line(input, |line| {
        let of_result = || Anchor::of_result(&serde_json::from_slice(line).ok()?);
        anchors.extend(Anchor::find(&String::from_utf8_lossy(line)).or_else(of_result));
        if anchors.is_empty() && whole.len() < MAX_RESULTS_LEN {
            whole.extend_from_slice(line);
            whole.push(b'\n');
        }
        Ok(())
    })?;
    if anchors.is_empty() {
        // A result that is printed on many lines, or is longer than a line is read.
        let results = serde_json::Deserializer::from_slice(&whole).into_iter::<Value>();
        anchors.extend(results.map_while(Result::ok).filter_map(|result| Anchor::of_result(&result)));
    }
    if anchors.is_empty() {
        bail!(
            "{}: no anchor in it: neither a line with `audit head CHAIN:SEQ:SHA256` nor a result whose `audit` has chain, seq and sha256",
            path.display()
        );
    }
    Ok(anchors)
}

fn describe(findings: &Findings, asked: &Verify, owner: u32) -> String {
    let mut out = String::new();
    for problem in &findings.problems {
        let line = if problem.line > 0 { format!(" line {}:", problem.line) } else { String::new() };
        out.push_str(&format!("{}:{line} {}\n", problem.file, problem.what));
    }
    if findings.omitted > 0 {
        out.push_str(&format!("{} more problems\n", findings.omitted));
    }
    for note in &findings.notes {
        out.push_str(&format!("note: {note}\n"));
    }
    let last = findings.end.as_ref().map_or(0, |end| end.seq);
    let state = match (findings.problems.is_empty(), findings.anchored_up_to) {
        (false, _) => String::from("changed, missing or out of order"),
        (true, Some(seq)) if seq == last => String::from("each in its place and unchanged"),
        (true, Some(seq)) => format!("up to record {seq} each in its place and unchanged; the chain is consistent behind it"),
        (true, None) => String::from("the chain is consistent"),
    };
    out.push_str(&format!("{} records in {} files: {state}", findings.records, findings.files));
    if let Some(end) = &findings.end {
        out.push_str(&format!("; the chain ends with {}:{}:{}", end.chain, end.seq, end.hash));
    }
    let unseen = "a change of the last record, a cut tail or a full rewrite cannot be seen";
    match (&asked.anchors, findings.anchored, findings.problems.is_empty()) {
        (None, _, true) => out.push_str(&format!("\nno anchor was given: {unseen}. {}\n", source_of_anchors(owner))),
        (None, _, false) => out.push('\n'),
        (Some(_), 0, _) => out.push_str(&format!("\nno anchor matched: {unseen}\n")),
        (Some(_), matched, _) => out.push_str(&format!("\n{matched} anchors matched\n")),
    }
    out.split('\n').map(|line| escape_line(line, is_not_ascii)).collect::<Vec<_>>().join("\n")
}

/// Where this host has anchors of that user's log.
fn source_of_anchors(owner: u32) -> String {
    match stockade_engine::audit::carrier() {
        // The message id excludes other messages of this program.
        Some(AnchorSink::Journal) => {
            format!("The journal has anchors: journalctl MESSAGE_ID={HEAD} _UID={owner} -o cat | stockade audit verify --anchors -")
        }
        Some(AnchorSink::Syslog) => String::from(
            "Syslog has anchors, and any user can forge one: grep 'audit head' /var/log/auth.log | stockade audit verify --anchors -",
        ),
        None => String::from("Neither journald nor syslog is here; results carry anchors: stockade audit verify --anchors result.json"),
    }
}

/// Every line, the longer ones in pieces.
fn each_line(input: impl Read, mut each: impl FnMut(&[u8]) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut input = BufReader::new(input);
    let mut line = Vec::new();
    while (&mut input).take(2 * MAX_LINE_LEN as u64).read_until(b'\n', &mut line)? > 0 {
        each(line.strip_suffix(b"\n").unwrap_or(&line))?;
        line.clear();
    }
    Ok(())
}

/// A record's text and its members; none of a line that is no record.
fn parse(line: &[u8]) -> Option<Value> {
    serde_json::from_slice(line).ok().filter(|value: &Value| value["event"].is_string() && value["time"].is_string())
}

fn each_record(directory: &Path, mut each: impl FnMut(&[u8], Value) -> anyhow::Result<()>) -> anyhow::Result<()> {
    for file in files(directory)? {
        let input = open(&file)?;
        each_line(input, |line| parse(line).map_or(Ok(()), |record| each(line, record)))?;
    }
    Ok(())
}

/// A record as it stands in the log: its SHA-256 is the next one's `prev`. A writer makes ASCII; of
/// anything else the bytes that a terminal could act on are escaped.
fn as_written(bytes: &[u8]) -> String {
    escape_json(&String::from_utf8_lossy(bytes), is_not_ascii)
}

/// A record on one line, for a person.
fn line(record: &Value) -> String {
    let word = |value: &Value| match value {
        Value::Null => String::from("-"),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let preview = match &record["files"] {
        Value::Null => {
            let preview = word(&record["code"]["preview"]);
            // The words of a command have NUL between them.
            let preview = if record["code"]["kind"] == "command" { preview.replace('\0', " ") } else { preview };
            preview.chars().take(60).collect()
        }
        files => format!("{} {}", word(&files["op"]), word(&files["path"])),
    };
    // A policy of a directory may have the name of a shipped one.
    let policy = |policy: &Value| match (word(&policy["name"]), word(&policy["origin"])) {
        (name, origin) if origin == "shipped" || origin == "-" || origin == name => name,
        (name, origin) => format!("{name} ({origin})"),
    };
    let labels = record["labels"].as_object().into_iter().flatten().map(|(name, value)| format!("{name}={}", word(value)));
    let words = [
        word(&record["time"]),
        word(&record["run"]),
        word(&record["event"]),
        word(&record["verdict"]),
        word(&record["reason"]),
        policy(&record["policy"]),
        format!("uid={}", word(&record["who"]["uid"])),
        format!("{}ms", word(&record["duration_ms"])),
    ];
    let via = record["via"].as_str().map(|via| format!("via={via}"));
    escape_line(&words.into_iter().chain(via).chain(labels).chain([preview]).collect::<Vec<_>>().join("  "), is_not_ascii)
}

fn is_of_a_run(record: &Value) -> bool {
    record["run"].is_string()
}

/// What `tail` prints of a record: with `json` all of them, else those of runs.
fn shown(bytes: &[u8], record: &Value, json: bool) -> Option<String> {
    if json { Some(as_written(bytes)) } else { is_of_a_run(record).then(|| line(record)) }
}

fn tail(directory: &Path, number: usize, follow: bool, json: bool) -> anyhow::Result<ExitCode> {
    let mut last = VecDeque::new();
    each_record(directory, |bytes, record| {
        last.extend(shown(bytes, &record, json));
        if last.len() > number {
            last.pop_front();
        }
        Ok(())
    })?;
    let mut place = end_of(directory)?;
    last.iter().try_for_each(|line| print_text(line))?;
    if !follow {
        return Ok(ExitCode::SUCCESS);
    }
    loop {
        thread::sleep(POLL_INTERVAL);
        place = go_on(directory, place, json)?;
    }
}

/// The last file and how far it was read.
fn end_of(directory: &Path) -> anyhow::Result<(PathBuf, u64)> {
    let file = files(directory)?.pop().with_context(|| format!("{} holds no audit log", directory.display()))?;
    let length = std::fs::metadata(&file)?.len();
    Ok((file, length))
}

/// Prints what was added behind a place, as far as lines are whole.
fn go_on(directory: &Path, (file, mut from): (PathBuf, u64), json: bool) -> anyhow::Result<(PathBuf, u64)> {
    let mut input = open(&file)?;
    input.seek(io::SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    input.read_to_end(&mut bytes)?;
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    from += whole as u64;
    let lines = bytes[..whole].split(|byte| *byte == b'\n');
    for line in lines.filter_map(|bytes| shown(bytes, &parse(bytes)?, json)) {
        print_text(&line)?;
    }
    // The files after it, one by one: none is passed over.
    let next = files(directory)?.into_iter().find(|other| *other > file);
    Ok(match next {
        Some(next) if whole == bytes.len() => (next, 0),
        _ => (file, from),
    })
}

fn show(directory: &Path, id: &str) -> anyhow::Result<ExitCode> {
    let mut found = false;
    each_record(directory, |_, record| {
        if record["run"] == id || record["id"] == id {
            found = true;
            return print_text(&escape_json(&serde_json::to_string_pretty(&record)?, is_not_ascii));
        }
        Ok(())
    })?;
    if !found {
        warn(&format!("stockade: no record in {} is of a run {id}, nor of a request with that id", directory.display()));
    }
    Ok(if found { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn query(filter: &Filter) -> anyhow::Result<ExitCode> {
    let times = [&filter.since, &filter.until].map(|time| time.as_deref().map(in_utc).transpose());
    let [since, until] = times;
    let filter = &Filter { since: since?, until: until?, ..filter.clone() };
    let mut found = false;
    each_record(&place(filter.log.as_deref())?, |bytes, record| {
        if is_of_a_run(&record) && fits(&record, filter) {
            found = true;
            return print_text(&if filter.json { as_written(bytes) } else { line(&record) });
        }
        Ok(())
    })?;
    Ok(if found { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A time as records have it: of the calendar, or so long before now.
fn in_utc(time: &str) -> anyhow::Result<String> {
    if text::is_time(time) {
        return Ok(time.to_owned());
    }
    if time == "today" {
        let now = text::time(SystemTime::now());
        return Ok(now.split('T').next().unwrap_or_default().to_owned());
    }
    let (number, unit) = time.split_at(time.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(time.len()));
    let seconds = match unit {
        "min" | "m" => 60,
        "h" => 3600,
        "d" => 86400,
        _ => bail!("{time}: write a time in UTC such as 2026-11-22, 2026-11-22T06:50 or today, or how long ago: 30min, 1h, 7d"),
    };
    let ago = number.parse::<u64>().ok().and_then(|number| number.checked_mul(seconds)).map(Duration::from_secs);
    let at = ago.and_then(|ago| SystemTime::now().checked_sub(ago)).with_context(|| format!("{time}: too long ago"))?;
    Ok(text::time(at))
}

fn fits(record: &Value, filter: &Filter) -> bool {
    let time = record["time"].as_str().unwrap_or_default();
    let bare = |time: &str| time.trim_end_matches('Z').to_owned();
    let wanted = |value: &Value, wanted: &Option<String>| wanted.as_ref().is_none_or(|wanted| value == wanted);
    filter.since.as_ref().is_none_or(|since| time >= bare(since).as_str())
        && filter.until.as_ref().is_none_or(|until| time < bare(until).as_str())
        && wanted(&record["event"], &filter.event)
        && wanted(&record["verdict"], &filter.verdict)
        && wanted(&record["policy"]["name"], &filter.policy)
        // No other run has it.
        && !(filter.without_checks && record["via"].is_string())
        && filter.labels.iter().all(|(name, value)| record["labels"][name] == *value)
}
