//! The pages of the documentation: their topics, what each is about, and their texts.
//!
//! `stockade help` shows them, and the manual is made of them.

/// A page's topic, what it is about, and its text.
pub(crate) const PAGES: &[(&str, &str, &str)] = &[
    ("quickstart", "ten minutes from the first run to a chart", include_str!("../help/quickstart.md")),
    ("recipes", "common tasks with stockade", include_str!("../help/recipes.md")),
    ("request-result", "requests, results and exit statuses", include_str!("../help/request-result.md")),
    ("reasons", "what each `reason` of a result means, and what to do", include_str!("../help/reasons.md")),
    ("policies", "what a policy is and what its keys mean", include_str!("../help/policies.md")),
    ("tighten", "how to restrict code further", include_str!("../help/tighten.md")),
    ("webassembly", "modules of WebAssembly, and Python by Pyodide", include_str!("../help/webassembly.md")),
    ("network", "which hosts code may reach", include_str!("../help/network.md")),
    ("screening", "what is found in code before it runs", include_str!("../help/screening.md")),
    ("approval", "code that waits for a person", include_str!("../help/approval.md")),
    ("bwrap", "bubblewrap's command line in front of a sandbox", include_str!("../help/bwrap.md")),
    ("security", "what is guaranteed, on which conditions, and what is not", include_str!("../help/security.md")),
    ("install", "build, package, containers, what is installed where", include_str!("../help/install.md")),
    ("images", "container images: import, store, limits", include_str!("../help/images.md")),
    ("users", "several users: own rights, sudo or a socket", include_str!("../help/users.md")),
    ("serve", "the HTTP service: endpoints, streams, batches, sessions, problems", include_str!("../help/serve.md")),
    ("serve-config", "the HTTP service: keys, configuration, quotas, metrics", include_str!("../help/serve-config.md")),
    ("interfaces", "the HTTP service by the interfaces of SandboxFusion and others", include_str!("../help/interfaces.md")),
    ("deploy", "the service under systemd, behind a proxy, in a container", include_str!("../help/deploy.md")),
    ("console", "the page of the HTTP service: what runs, ended and was refused", include_str!("../help/console.md")),
    ("operate", "audit log, monitoring, update, rollback, removal", include_str!("../help/operate.md")),
    ("audit-log", "what is recorded of every run", include_str!("../help/audit-log.md")),
    ("troubleshooting", "symptoms, causes and remedies", include_str!("../help/troubleshooting.md")),
    ("performance", "what a run costs", include_str!("../help/performance.md")),
];
