//! Rules about calls: which function is called with which arguments.
//!
//! It evaluates nothing itself; [`super::value`] does.

use ruff_python_ast::{Expr, ExprCall, ExprLambda, visitor::Visitor};
use stockade_protocol::screen::{Grammar, Rule, Source};

use super::{Walk, place, tables, value::Value};
use crate::{budget, paths, screen_string, shell};

/// Calls that write to the path of this argument, or take it away.
const WRITERS: [(&str, usize); 24] = [
    ("shutil.copy", 1),
    ("shutil.copy2", 1),
    ("shutil.copyfile", 1),
    ("shutil.copytree", 1),
    ("shutil.move", 1),
    ("os.rename", 1),
    ("os.renames", 1),
    ("os.replace", 1),
    ("shutil.move", 0),
    ("os.rename", 0),
    ("os.renames", 0),
    ("os.replace", 0),
    ("os.link", 1),
    ("os.symlink", 1),
    ("os.makedirs", 0),
    ("os.mkdir", 0),
    ("os.mkfifo", 0),
    ("os.chmod", 0),
    ("os.chown", 0),
    ("os.truncate", 0),
    ("os.remove", 0),
    ("os.unlink", 0),
    ("os.rmdir", 0),
    ("urllib.request.urlretrieve", 1),
];
/// Calls that delete one file.
const REMOVERS: [&str; 4] = ["os.remove", "os.unlink", "os.rmdir", "os.truncate"];
/// Methods of paths that write.
const WRITING_METHODS: [&str; 9] = ["write_text", "write_bytes", "touch", "mkdir", "unlink", "rmdir", "symlink_to", "hardlink_to", "chmod"];
/// Methods of psutil's processes that act on them; others only look.
const ACTS_ON_PROCESSES: [&str; 5] = ["kill", "terminate", "send_signal", "suspend", "resume"];
/// Calls that give text to a shell.
const SHELLS: [&str; 6] =
    ["os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "pexpect.run"];

impl<'a> Walk<'a, '_, '_> {
    /// A call with its arguments.
    pub(super) fn call(&mut self, expr: &Expr, call: &'a ExprCall) {
        let functions = self.names.readings(&call.func);
        let arguments: Vec<Value> = call.arguments.args.iter().map(|argument| self.names.value(argument)).collect();
        for function in &functions {
            let name = function.as_name().unwrap_or_default();
            self.by_name(expr, call, name, &arguments);
            self.recursion(expr, call, name, &arguments);
        }
        self.by_method(expr, call, &arguments);
        for keyword in &call.arguments.keywords {
            if let Some(keyword_name) = &keyword.arg {
                self.named_text(keyword_name.as_str(), &keyword.value);
            }
        }
        match &*call.func {
            Expr::Lambda(lambda) => self.lambda(lambda, &arguments),
            // The function is the result of a call, which no other rule reports by name.
            function @ Expr::Call(_) => {
                self.reference(function);
                self.visit_expr(function);
            }
            function => self.visit_expr(function),
        }
        call.arguments.args.iter().for_each(|argument| self.visit_expr(argument));
        for keyword in &call.arguments.keywords {
            if !(keyword.arg.as_deref() == Some("env") && self.is_environment(&keyword.value)) {
                self.visit_expr(&keyword.value);
            }
        }
    }

    /// The body of a lambda that is called with these arguments.
    pub(super) fn lambda(&mut self, lambda: &'a ExprLambda, arguments: &[Value]) {
        self.function("", |walk| {
            if let Some(parameters) = &lambda.parameters {
                walk.visit_parameters(parameters);
                walk.names.bind_parameters(parameters);
                for (parameter, value) in parameters.iter().zip(arguments) {
                    walk.names.bind(parameter.name().as_str(), value.clone());
                }
            }
            walk.visit_expr(&lambda.body);
        });
    }

    fn by_name(&mut self, expr: &Expr, call: &ExprCall, name: &str, arguments: &[Value]) {
        let first = arguments.first();
        match name {
            "builtins.exec" | "builtins.eval" | "builtins.compile" => self.runs_text(expr, call, name, first),
            "timeit.timeit" | "timeit.repeat" => self.inner_python(call, first),
            "builtins.__import__" | "importlib.import_module" | "importlib.__import__" => self.imports(expr, name, first),
            "importlib.util.spec_from_file_location" | "imp.load_source" | "importlib.machinery.SourceFileLoader" => {
                self.add(Rule::DynamicImport, expr, name);
            }
            "builtins.getattr" => self.gets_attribute(expr, call, arguments),
            "builtins.open" | "io.open" | "codecs.open" | "gzip.open" | "bz2.open" | "lzma.open" | "tarfile.open" => {
                let (path, mode) = (self.argument(call, "file", 0), self.argument(call, "mode", 1));
                self.opens(expr, path.as_ref(), mode.as_ref());
            }
            "os.open" if call.arguments.find_positional(1).is_some_and(|flags| self.writes_by(flags)) => self.writes(expr, name, first),
            "shutil.rmtree" | "os.removedirs" => {
                let vital = first.and_then(Value::as_text).is_some_and(paths::is_vital);
                self.add(if vital || self.vital > 0 { Rule::Destroy } else { Rule::Delete }, expr, name);
            }
            "yaml.load" => {
                let loader = self.argument(call, "Loader", 1);
                if !loader.as_ref().and_then(Value::as_name).is_some_and(|name| name.ends_with("SafeLoader")) {
                    self.add(Rule::Deserialize, expr, name);
                }
            }
            "numpy.load" if call.arguments.find_keyword("allow_pickle").is_some() => self.add(Rule::Deserialize, expr, name),
            "operator.methodcaller" | "operator.attrgetter" => {
                if let Some(attribute) = first.and_then(Value::as_text).filter(|text| tables::is_strong(text)) {
                    self.add(Rule::Internals, expr, attribute);
                }
            }
            _ if SHELLS.contains(&name) => self.gives_to_shell(expr, call, first),
            _ if name.starts_with("subprocess.")
                || name.starts_with("os.exec")
                || name.starts_with("os.spawn")
                || name.starts_with("os.posix_spawn") =>
            {
                self.starts(expr, call, name, arguments);
            }
            _ => {}
        }
        for (_, at) in WRITERS.iter().filter(|(writer, _)| *writer == name) {
            let path = self.argument(call, if *at == 0 { "src" } else { "dst" }, *at);
            self.writes(expr, name, path.as_ref());
            if name == "urllib.request.urlretrieve"
                && let Some(path) = path.as_ref().and_then(Value::as_text)
            {
                self.findings.fetches(path);
            }
            if REMOVERS.contains(&name) && self.vital > 0 {
                self.add(Rule::Destroy, expr, name);
            }
        }
    }

    /// The value of an argument, by name or position.
    fn argument(&self, call: &ExprCall, name: &str, position: usize) -> Option<Value> {
        call.arguments.find_argument_value(name, position).map(|argument| self.names.value(argument))
    }

    /// Whether these flags of `os.open` write.
    fn writes_by(&self, flags: &Expr) -> bool {
        match flags {
            Expr::BinOp(both) => self.writes_by(&both.left) || self.writes_by(&both.right),
            flag => self
                .names
                .value(flag)
                .as_name()
                .is_some_and(|name| matches!(name, "os.O_WRONLY" | "os.O_RDWR" | "os.O_CREAT" | "os.O_TRUNC" | "os.O_APPEND")),
        }
    }

    /// `exec`, `eval`, `compile`. Their use is reported by name elsewhere.
    fn runs_text(&mut self, expr: &Expr, call: &ExprCall, name: &str, text: Option<&Value>) {
        let Some(text) = text else { return };
        let name = name.trim_start_matches("builtins.");
        if text.made.decoded || text.made.built {
            self.add(Rule::DecodedCode, expr, name);
        }
        if text.made.fetched {
            self.add(Rule::RemoteCode, expr, name);
        }
        self.inner_python(call, Some(text));
    }

    /// Code in a known string.
    fn inner_python(&mut self, call: &ExprCall, text: Option<&Value>) {
        if let (Some(argument), Some(code)) = (call.arguments.args.first(), text.and_then(Value::as_whole)) {
            self.inner(argument, Source { grammar: Grammar::Python, code });
        }
    }

    fn inner(&mut self, at: &Expr, source: Source<'_>) {
        screen_string(self.question, source, self.depth, place(at), self.findings);
    }

    fn imports(&mut self, expr: &Expr, name: &str, module: Option<&Value>) {
        match module.and_then(|module| module.as_whole().map(|name| (name.to_owned(), module.made))) {
            Some((module, made)) => {
                if (made.built || made.decoded) && tables::is_watched(&module) {
                    self.add(Rule::HiddenName, expr, &module);
                } else if made.built || made.decoded {
                    self.add(Rule::DynamicImport, expr, &module);
                }
                self.import(&super::canonical(&module), expr);
            }
            None if module.is_some_and(|module| module.made.built || module.made.decoded) => self.add(Rule::HiddenName, expr, name),
            None => self.add(Rule::DynamicImport, expr, name.trim_start_matches("builtins.")),
        }
    }

    fn gets_attribute(&mut self, expr: &Expr, call: &ExprCall, arguments: &[Value]) {
        let ([_, name, ..], Some(object)) = (arguments, call.arguments.args.first()) else { return };
        if let Some(attribute) = name.as_whole() {
            let attribute = attribute.to_owned();
            self.attribute(expr, object, &attribute);
            self.reference(expr);
            if name.made.built && attribute.starts_with("__") {
                self.add(Rule::HiddenName, expr, &attribute);
            }
        }
    }

    /// An attribute, by syntax or `getattr`.
    pub(super) fn attribute(&mut self, expr: &Expr, object: &Expr, name: &str) {
        if tables::is_strong(name) {
            self.add(Rule::Internals, expr, name);
        }
        // The base of an object's class leads to every class.
        let class_of = |expr: &Expr| match expr {
            Expr::Attribute(attribute) => attribute.attr.as_str() == "__class__",
            Expr::Call(call) => call
                .arguments
                .args
                .get(1)
                .is_some_and(|name| matches!(name, Expr::StringLiteral(text) if text.value.to_str() == "__class__")),
            _ => false,
        };
        if matches!(name, "__base__" | "__mro__") && class_of(object) {
            self.add(Rule::Internals, expr, name);
        }
        if name == "__self__" && self.names.value(object).as_name().is_some_and(|name| name.starts_with("builtins.")) {
            self.add(Rule::Internals, expr, name);
        }
        if name == "__dict__" && self.names.value(object).as_name().is_some_and(|name| name == "builtins" || name.ends_with(".__self__")) {
            self.add(Rule::Internals, expr, "builtins.__dict__");
        }
    }

    fn opens(&mut self, expr: &Expr, path: Option<&Value>, mode: Option<&Value>) {
        // A longer text in its place is no mode.
        if mode.and_then(Value::as_text).is_some_and(|mode| mode.len() <= 4 && mode.contains(['w', 'a', 'x', '+'])) {
            self.writes(expr, "open", path);
            if self.vital > 0 {
                self.add(Rule::Destroy, expr, "open");
            }
        }
    }

    /// A file is written, moved or created at this path.
    fn writes(&mut self, expr: &Expr, what: &str, path: Option<&Value>) {
        let Some(path) = path.and_then(Value::as_text) else { return };
        if paths::is_disk(path) {
            self.add(Rule::Destroy, expr, path);
        } else if paths::is_outside(path, self.question.scratch) {
            self.add(Rule::WriteOutside, expr, &format!("{what} {path}"));
        }
    }

    fn by_method(&mut self, expr: &Expr, call: &ExprCall, arguments: &[Value]) {
        let Expr::Attribute(attribute) = &*call.func else { return };
        if self.psutil && ACTS_ON_PROCESSES.contains(&attribute.attr.as_str()) {
            self.add(Rule::Process, expr, attribute.attr.as_str());
        }
        let object = self.names.value(&attribute.value);
        if object.as_text().is_none() {
            return;
        }
        match attribute.attr.as_str() {
            "open" => self.opens(expr, Some(&object), self.argument(call, "mode", 0).as_ref()),
            name @ ("rename" | "replace") if arguments.len() == 1 => {
                self.writes(expr, name, Some(&object));
                self.writes(expr, name, arguments.first());
            }
            name if WRITING_METHODS.contains(&name) => self.writes(expr, name, Some(&object)),
            _ => {}
        }
    }

    fn gives_to_shell(&mut self, expr: &Expr, call: &ExprCall, script: Option<&Value>) {
        let Some(value) = script else { return };
        if value.made.decoded {
            self.add(Rule::DecodedCode, expr, "shell");
        }
        if value.made.fetched {
            self.add(Rule::RemoteCode, expr, "shell");
        }
        if let (Some(script), Some(at)) = (value.as_text(), call.arguments.args.first()) {
            self.inner(at, Source { grammar: Grammar::Shell, code: script });
        }
    }

    /// A program is started with a list of words, or with a string for a shell.
    fn starts(&mut self, expr: &Expr, call: &ExprCall, name: &str, arguments: &[Value]) {
        let words: Vec<String> = match arguments {
            [program, rest @ ..] if name.starts_with("os.") => {
                let listed = rest.iter().find(|value| !value.items().is_empty()).map(|list| list.items().to_vec());
                let words = listed.unwrap_or_else(|| rest.to_vec());
                std::iter::once(program).chain(words.get(1..).unwrap_or_default()).map(word).collect()
            }
            [first, ..] if !first.items().is_empty() => first.items().iter().map(word).collect(),
            [first, ..] => {
                self.gives_to_shell(expr, call, Some(first));
                return;
            }
            [] => return,
        };
        if arguments.iter().any(|value| value.made.decoded) {
            self.add(Rule::DecodedCode, expr, name);
        }
        let Some(at) = call.arguments.args.first() else { return };
        if let Some(depth) = self.depth.checked_sub(1) {
            let question = self.question;
            let length = words.iter().map(String::len).sum();
            self.findings.inside(place(at), budget::of_shell(length), |findings| shell::screen_words(question, words, depth, findings));
        }
    }

    /// Processes that start themselves again.
    fn recursion(&mut self, expr: &Expr, call: &ExprCall, name: &str, arguments: &[Value]) {
        let own_name = match &*call.func {
            Expr::Name(name) => name.id.as_str(),
            _ => "",
        };
        let forks = matches!(name, "os.fork" | "os.forkpty");
        let spawns = name == "multiprocessing.Process" || name.starts_with("subprocess.");
        let own_file =
            |value: &Value| value.as_name() == Some("__file__") || value.items().iter().any(|item| item.as_name() == Some("__file__"));
        let starts_itself = match call.arguments.find_keyword("target").map(|target| &target.value) {
            Some(Expr::Name(name)) => self.function.iter().any(|function| function.name == name.id.as_str()),
            _ => false,
        };
        if (forks && self.endless > 0)
            || (spawns && self.endless > 0 && arguments.iter().any(own_file))
            || (name == "multiprocessing.Process" && starts_itself)
        {
            self.add(Rule::ForkBomb, expr, name);
        }
        if let Some(function) = self.function.last_mut() {
            function.forks |= forks;
            function.calls_itself |= !own_name.is_empty() && own_name == function.name;
            if function.forks && function.calls_itself {
                let name = function.name.clone();
                self.add(Rule::ForkBomb, expr, &name);
            }
        }
    }
}

fn word(value: &Value) -> String {
    value.as_text().unwrap_or(if value.as_name() == Some("sys.executable") { "python3" } else { "*" }).to_owned()
}
