//! `stockade serve`: configuration, keys and policies of the service, and where it listens.
//!
//! Nothing is served before all three are read and good, and before an empty program has run under
//! each policy. When they are read again, the service keeps those that it has unless all are good. The
//! processes of the service are `server`'s.

pub(crate) mod examine;
mod listen;

use std::{
    fs, io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant, UNIX_EPOCH},
};

use anyhow::{Context, bail};
use stockade_engine::{
    Options,
    caller::{self, Caller},
    facts::share_delegated_cgroup,
    load_policy,
};
use stockade_policy::{
    model::{Policy, SharedBy},
    service::{Credential, Scope, ServeConfig, ServiceKey, ServiceKeys},
};
use stockade_protocol::{
    LimitKey,
    service::{self, Capacity, ExecuteFacade, Facades, Key, Lack, RunSize, SandboxFusionFacade, Settings},
};
use stockade_server::service::{
    NotTaken, Reading, ServedTemplate, Service, ServiceEnd, ServiceSettings, keep as keep_for, ready_workers, serve, work as work_for,
};

use crate::{ExitCode, args, key::service_file, output::warn};
use examine::{Examination, Findings};

/// The account that has the front, and the runs of keys, where root serves.
const ACCOUNT: &str = "stockade-serve";
/// More workers would spend their memory on waiting.
const MAX_WORKERS: u32 = 256;

/// Everything that the service has read.
struct Configured {
    config: ServeConfig,
    settings: Settings,
    templates: Vec<ServedTemplate>,
    keys: Vec<ServiceKey>,
    unix: Option<PathBuf>,
    tcp: Option<SocketAddr>,
}

pub(crate) fn run(serve_args: &args::Serve) -> anyhow::Result<ExitCode> {
    let account = account()?;
    let read = || configure(serve_args.config.as_deref(), account.as_ref());
    let mut first = read()?;
    // Not when the keys are read again: the last token may have been revoked.
    first.tcp = listen::tcp_address(&first.config, has_tokens(&first.keys))?;
    if !serve_args.check {
        share_delegated_cgroup()?;
    }
    Examination::begin(&first.keys, &first.settings, None)?.wait()?.put_into(&mut first.settings);
    if let Some(lack) = first.settings.lacks.iter().find(|lack| lack.prevents) {
        bail!("{lack} (more: stockade doctor --policy {})", lack.policy);
    }
    for lack in &first.settings.lacks {
        warn(&format!("stockade: {} (more: stockade doctor --policy {})", lack.in_short(), lack.policy));
    }
    warn_of_facades(&first.settings);
    if serve_args.check {
        let names = |names: Vec<&str>| names.join(", ");
        let keys = names(first.settings.keys.iter().map(|key| key.id.as_str()).collect());
        let policies = names(first.settings.policies.keys().map(String::as_str).collect());
        warn(&format!("stockade: the service can be started; keys: {keys}; policies: {policies}"));
        return Ok(ExitCode::SUCCESS);
    }
    let listening = listen::listen(first.unix.as_deref(), first.tcp, account.is_some())?;
    let service = Service {
        workers: first.settings.workers as usize,
        drain: Duration::from_millis(first.config.limits.drain),
        account: account.clone(),
        settings: ServiceSettings { front: first.settings.clone(), templates: first.templates.clone() },
        read_again: Box::new(|| {
            let next = read().map_err(not_taken)?;
            let examination = Examination::begin(&next.keys, &next.settings, Some(&first.settings)).map_err(not_taken)?;
            Ok(Box::new(NextSettings { first: &first, next: Some(next), examination }))
        }),
        addresses: listening.addresses.clone(),
        tell: Box::new(warn),
        ready: Box::new(|| warn(&format!("stockade: serving at {}", listening.addresses))),
    };
    let ended = serve(&service, listening.listeners);
    // Clients see at once that the service is gone.
    listening.own_file.map(fs::remove_file);
    match ended? {
        ServiceEnd::Signal(_) => Ok(ExitCode::SUCCESS),
    }
}

/// What was read while the service is running, until the host was examined for it.
struct NextSettings<'a> {
    /// What it began with.
    first: &'a Configured,
    /// None: it was taken.
    next: Option<Configured>,
    examination: Examination,
}

impl Reading for NextSettings<'_> {
    fn awaited(&self) -> BorrowedFd<'_> {
        self.examination.stdout()
    }

    fn until(&self) -> Option<Instant> {
        self.examination.until()
    }

    fn poll(&mut self) -> Option<Result<ServiceSettings, NotTaken>> {
        let findings = self.examination.poll().transpose()?;
        let next = self.next.take()?;
        Some(findings.map_err(not_taken).and_then(|findings| checked(self.first, next, findings)))
    }
}

/// Settings that may take the place of those before.
fn checked(first: &Configured, mut next: Configured, findings: Findings) -> Result<ServiceSettings, NotTaken> {
    findings.put_into(&mut next.settings);
    if let Some(why) = next.settings.lacks.iter().find(|lack| lack.prevents).map(Lack::to_string) {
        return Err(NotTaken { why, lacks: Some(next.settings.lacks) });
    }
    let (before, after) = (&first.config, &next.config);
    if (&before.listen, before.limits.drain) != (&after.listen, after.limits.drain) || first.settings.workers != next.settings.workers {
        warn("stockade: another address, `drain` or number of runs at a time takes effect when the service is started anew");
    }
    warn_of_facades(&next.settings);
    next.settings.workers = first.settings.workers;
    Ok(ServiceSettings { front: next.settings, templates: next.templates })
}

fn warn_of_facades(settings: &Settings) {
    unusable(settings).iter().for_each(|said| warn(&format!("stockade: warning: {said}")));
}

fn not_taken(error: anyhow::Error) -> NotTaken {
    NotTaken { why: format!("{error:#}"), lacks: None }
}

fn has_tokens(keys: &[ServiceKey]) -> bool {
    keys.iter().any(|key| matches!(key.credential, Credential::Hash(_)))
}

/// A worker of the service; stdin leads to the front, stdout to the supervisor.
pub(crate) fn work() -> anyhow::Result<ExitCode> {
    let own = |stream: rustix::fd::BorrowedFd<'_>| stream.try_clone_to_owned().context("a worker's sockets");
    work_for(own(io::stdin().as_fd())?, own(io::stdout().as_fd())?, account_of_runs()?)?;
    Ok(ExitCode::SUCCESS)
}

/// The keeper of a session of the service; stdin leads to the supervisor.
pub(crate) fn keep(keeper: &args::ServeKeeper) -> anyhow::Result<ExitCode> {
    let supervisor = io::stdin().as_fd().try_clone_to_owned().context("a keeper's socket")?;
    keep_for(supervisor, &keeper.key, &keeper.policy, account_of_runs()?)?;
    Ok(ExitCode::SUCCESS)
}

/// Whose runs of a key are, for a process that a service has started. Its word for a key takes the place of
/// grants, so no user gets it through sudo.
pub(crate) fn account_of_runs() -> anyhow::Result<Option<Caller>> {
    if let Some(remedy) = caller::sudo_remedy() {
        bail!("a service alone starts this, and {remedy}");
    }
    account()
}

/// Where root serves: whose the runs are.
fn account() -> anyhow::Result<Option<Caller>> {
    if !caller::identify(None)?.privileged {
        return Ok(None);
    }
    let account = caller::account(ACCOUNT).filter(|account| account.uid != 0);
    let remedy = format!("adduser --system --group --no-create-home {ACCOUNT}");
    account.map(Some).with_context(|| {
        format!("root serves with runs of the user {ACCOUNT}, which this host has not; the package makes it, or: {remedy}")
    })
}

fn configure(file: Option<&Path>, account: Option<&Caller>) -> anyhow::Result<Configured> {
    let path = file.map_or_else(|| service_file("serve.toml", "--config"), |file| Ok(file.to_owned()))?;
    let user = rustix::process::geteuid().as_raw();
    let config = match (ServeConfig::load(&path, user)?, file) {
        (Some(config), _) => config,
        (None, Some(file)) => bail!("{} does not exist", file.display()),
        (None, None) => ServeConfig::of_no_file(&path),
    };
    let keys = ServiceKeys::load(&config.keys, user)?;
    let keys = keys.filter(|keys| !keys.keys.is_empty()).with_context(|| {
        let keys = config.keys.display();
        format!("{keys} has no key, so no request could be served; make one: stockade key new NAME --policy default --add --file {keys}")
    })?;
    let mut settings = Settings {
        keys: keys.keys.iter().map(key_of).collect(),
        hosts: config.hosts.clone(),
        capacity: capacity(&config)?,
        max_body: config.limits.body,
        max_buffers: config.limits.buffers,
        stream_size: config.limits.stream_size,
        policies: std::collections::BTreeMap::new(),
        compiled: std::collections::BTreeMap::new(),
        lacks: Vec::new(),
        explained: std::collections::BTreeMap::new(),
        inventories: std::collections::BTreeMap::new(),
        workers: 0,
        facades: facades(&config),
    };
    let mut templates = Vec::new();
    for key in &keys.keys {
        for policy in &key.policies {
            let options = Options { policy: Some(policy.clone()), peer: account.cloned(), key: Some(key.id.clone()), ..Options::default() };
            let loaded = load_policy(&options).with_context(|| format!("{}:{}: key {}", keys.path.display(), key.line, key.id))?;
            let whole = settings.capacity.size;
            let limit = |limit: LimitKey, whole: u64| loaded.policy.limits.get(limit).unwrap_or(whole);
            let size = RunSize { cpus: limit(LimitKey::Cpus, whole.cpus), memory: limit(LimitKey::Memory, whole.memory) };
            if settings.policies.insert(policy.clone(), size).is_none() {
                settings.compiled.insert(policy.clone(), compiled_by(&loaded.policy));
                let explanation = serde_json::to_value(stockade_policy_tools::explain(&loaded.policy, None));
                settings.explained.insert(policy.clone(), explanation.context("explain a policy")?);
                templates.extend(templates_of(policy, &loaded.policy));
            }
        }
    }
    settings.workers = workers(&settings);
    refuse_too_many_ready(&settings, &templates)?;
    let unix = listen::unix_path(&config, account.is_some());
    Ok(Configured { config, settings, templates, keys: keys.keys, unix, tcp: None })
}

/// Every name of the languages that a policy compiles first.
fn compiled_by(policy: &Policy) -> Vec<String> {
    let compiled = policy.runtimes.iter().filter(|(_, runtime)| runtime.compiles());
    let names = compiled.flat_map(|(name, runtime)| {
        let unnamed = (*name == policy.language).then(String::new);
        std::iter::once(name).chain(&runtime.aliases).map(|name| name.to_ascii_lowercase()).chain(unnamed)
    });
    names.collect()
}

/// The templates of a policy that keys name so.
fn templates_of(name: &str, policy: &Policy) -> Vec<ServedTemplate> {
    let of_runtime = |runtime: &String| {
        let (template, settings) = policy.template_of(runtime)?;
        Some(ServedTemplate {
            policy: name.to_owned(),
            runtime: runtime.clone(),
            name: template.to_owned(),
            max_runs: settings.max_runs,
            max_age: settings.max_age,
            images: settings.images,
            is_shared: settings.shared_by == SharedBy::Policy,
            ready: settings.ready,
        })
    };
    policy.runtimes.keys().filter_map(of_runtime).collect()
}

/// Each of them is a worker's, all the time.
fn refuse_too_many_ready(settings: &Settings, templates: &[ServedTemplate]) -> anyhow::Result<()> {
    let (wanted, workers) = (ready_workers(&settings.keys, templates).len(), settings.workers as usize);
    if wanted <= workers {
        return Ok(());
    }
    let one = |served: &ServedTemplate| {
        let each = if served.is_shared { "" } else { " for each of its keys" };
        format!("ready = {}{each} in [templates.{}] of policy {}", served.ready, served.name, served.policy)
    };
    let all: Vec<String> = templates.iter().filter(|served| served.ready > 0).map(one).collect();
    bail!(
        "{wanted} workers would have to be ready, and there are {workers}: {}; lower `ready`, or give the service more [capacity]",
        all.join(", ")
    )
}

fn key_of(key: &ServiceKey) -> Key {
    Key {
        id: key.id.clone(),
        credential: match &key.credential {
            Credential::Hash(hash) => service::Credential::Sha256(stockade_protocol::text::hex(hash)),
            Credential::Uid(uid) => service::Credential::Uid(*uid),
        },
        policies: key.policies.clone(),
        scopes: key.scopes.iter().map(|scope| scope_of(*scope)).collect(),
        running: key.running,
        waiting: key.waiting,
        runs_per_minute: key.runs_per_minute,
        cpu_per_hour: key.cpu_per_hour,
        weight: key.weight,
        sessions: key.sessions,
        expires: key.expires.map(|end| end.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().cast_signed())),
    }
}

fn scope_of(scope: Scope) -> service::Scope {
    match scope {
        Scope::Run => service::Scope::Run,
        Scope::Keep => service::Scope::Keep,
        Scope::Facade => service::Scope::Facade,
        Scope::Watch => service::Scope::Watch,
    }
}

/// What runs together may use: by the configuration, or of the host.
fn capacity(config: &ServeConfig) -> anyhow::Result<Capacity> {
    let own = || std::thread::available_parallelism().map(|cpus| cpus.get() as u64 * 1000).context("count the CPUs");
    let cpus = config.capacity.cpus.map_or_else(own, Ok)?;
    let memory = config.capacity.memory.map_or_else(most_of_memory, Ok)?;
    let size = RunSize { cpus: cpus * config.capacity.oversubscribe / 1000, memory };
    Ok(Capacity { size, waiting: config.capacity.waiting, queue_ms: config.capacity.queue, sessions: config.capacity.sessions })
}

/// 80 % of the host's memory, in bytes.
fn most_of_memory() -> anyhow::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(line.context("/proc/meminfo does not say how much memory there is")? * 1024 / 5 * 4)
}

fn facades(config: &ServeConfig) -> Facades {
    let (fusion, execute) = (&config.sandbox_fusion, &config.execute);
    Facades {
        sandbox_fusion: fusion.enabled.then(|| SandboxFusionFacade { policy: fusion.policy.clone(), heartbeat_ms: fusion.heartbeat }),
        execute: execute.enabled.then(|| ExecuteFacade { policy: execute.policy.clone() }),
    }
}

/// What of the facades no key can use: told, since a key that was taken away must not stay for it.
fn unusable(settings: &Settings) -> Vec<String> {
    let Facades { sandbox_fusion, execute } = &settings.facades;
    let named = [
        ("sandbox_fusion", sandbox_fusion.as_ref().map(|facade| &facade.policy)),
        ("execute", execute.as_ref().map(|facade| &facade.policy)),
    ];
    let mut said = Vec::new();
    for (name, policy) in named.into_iter().filter_map(|(name, policy)| Some((name, policy?))) {
        let mut keys = settings.keys.iter().filter(|key| key.scopes.contains(&service::Scope::Facade)).peekable();
        if keys.peek().is_none() {
            said.push(format!("[facade.{name}] is enabled, but no key has \"facade\" in its `scopes`"));
        } else if let Some(policy) = policy.as_ref().filter(|policy| !keys.any(|key| key.policies.contains(policy))) {
            said.push(format!("[facade.{name}] runs code under policy {policy}, which no key with the scope \"facade\" may use"));
        }
    }
    said
}

/// As many as there can be runs at a time.
fn workers(settings: &Settings) -> u32 {
    let whole = settings.capacity.size;
    let fit = |size: &RunSize| (whole.cpus / size.cpus.max(1)).min(whole.memory / size.memory.max(1));
    let most = settings.policies.values().map(fit).max().unwrap_or(1);
    u32::try_from(most).unwrap_or(u32::MAX).clamp(1, MAX_WORKERS)
}
