//! Rules over a parsed Python program.
//!
//! One walk in the order of the text. The bodies of functions come after the scope around them, when
//! all its names are bound ([`names`]). [`value`] evaluates expressions, [`tables`] lists the names
//! that rules know. A program with a syntax error is searched as far as the parser got.

mod calls;
mod names;
mod tables;
mod value;

use ruff_python_ast::{
    Alias, Comprehension, ElifElseClause, ExceptHandler, Expr, MatchCase, Stmt, StmtClassDef, StmtFunctionDef,
    visitor::{self, Visitor},
};
use ruff_python_parser::{Mode, ParseOptions, parse_unchecked};
use ruff_text_size::Ranged;
use stockade_protocol::screen::{Question, Rule};

use crate::{encoding, findings::Findings, paths, secrets};
use names::Names;
use value::{Value, canonical};

/// Expressions that are nested deeper are not walked.
const MAX_DEPTH: u16 = 1000;

/// Screens a Python file.
pub(crate) fn screen_file(question: &Question<'_>, code: &str, depth: u8, findings: &mut Findings<'_>) {
    if let Some((place, name)) = encoding::foreign(code) {
        findings.add(Rule::DecodedCode, place, &format!("a file in {name}"));
    }
    screen(question, code, depth, findings);
}

/// Screens a Python program.
pub(crate) fn screen(question: &Question<'_>, code: &str, depth: u8, findings: &mut Findings<'_>) {
    let parsed = parse_unchecked(code, ParseOptions::from(Mode::Module));
    if let Some(error) = parsed.errors().first() {
        // A string that does not parse is no code.
        if findings.is_inside() {
            return;
        }
        findings.add(Rule::Syntax, place(error), &error.error.to_string());
    }
    let mut walk = Walk {
        question,
        depth,
        names: Names::new(findings.budget()),
        findings,
        told: 0,
        endless: 0,
        vital: 0,
        nested: 0,
        psutil: false,
        function: Vec::new(),
        later: Vec::new(),
    };
    if let ruff_python_ast::Mod::Module(module) = parsed.syntax() {
        walk.visit_body(&module.body);
        walk.functions();
    }
    // Dropping a deep tree overflows the stack. The process ends soon.
    std::mem::forget(parsed);
}

/// The place of a node.
fn place(ranged: &impl Ranged) -> (usize, usize) {
    (ranged.start().to_usize(), ranged.end().to_usize())
}

/// A function whose body is read.
struct Function {
    name: String,
    forks: bool,
    calls_itself: bool,
}

struct Walk<'a, 'w, 'c> {
    question: &'w Question<'w>,
    depth: u8,
    findings: &'w mut Findings<'c>,
    names: Names,
    /// Strings before this offset were checked as parts of a longer one.
    told: usize,
    /// Endless loops around this place.
    endless: u32,
    /// Loops over a system or home directory around this place.
    vital: u32,
    /// Depth of nested expressions.
    nested: u16,
    /// The program imports psutil, whose processes come from many calls.
    psutil: bool,
    function: Vec<Function>,
    /// Functions of this scope whose bodies come later.
    later: Vec<&'a StmtFunctionDef>,
}

impl<'a> Walk<'a, '_, '_> {
    fn add(&mut self, rule: Rule, at: &impl Ranged, what: &str) {
        self.findings.add(rule, place(at), what);
    }

    /// A module is imported.
    fn import(&mut self, module: &str, at: &impl Ranged) {
        for rule in tables::rules(module).collect::<Vec<_>>() {
            self.add(rule, at, &format!("import {module}"));
        }
        self.psutil |= module.split('.').next() == Some("psutil");
        let allowed = &self.question.modules;
        let covers = |allowed: &&str| module.strip_prefix(*allowed).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        if !allowed.is_empty() && !allowed.iter().any(covers) {
            self.add(Rule::Module, at, &format!("import {module}"));
        }
    }

    fn import_alias(&mut self, alias: &Alias) {
        let module = canonical(alias.name.as_str());
        self.import(&module, alias);
        match &alias.asname {
            Some(name) => self.names.bind(name.as_str(), Value::name(module)),
            None => {
                let top = module.split('.').next().unwrap_or_default().to_owned();
                self.names.bind(alias.name.split('.').next().unwrap_or_default(), Value::name(top));
            }
        }
    }

    fn import_from(&mut self, module: &str, alias: &Alias) {
        let module = canonical(module);
        if alias.name.as_str() == "*" {
            self.import(&module, alias);
            // Of the names of a star import, those that rules know are bound.
            for name in tables::names_of(&module) {
                self.names.bind(name, Value::name(format!("{module}.{name}")));
            }
            return;
        }
        let whole = canonical(&format!("{module}.{}", alias.name));
        // `from http import client` imports a module; `from urllib import parse` imports one that
        // is harmless, unlike its parent.
        self.import(&whole, alias);
        let value = Value::name(module).attribute(alias.name.as_str());
        self.names.bind(alias.asname.as_ref().unwrap_or(&alias.name).as_str(), value);
    }

    /// A name or an attribute is used.
    fn reference(&mut self, expr: &Expr) -> bool {
        let mut known = false;
        for value in self.names.readings(expr) {
            let Some(name) = value.as_name() else { continue };
            known = true;
            for rule in tables::rules(name) {
                self.add(rule, expr, name);
            }
            if let Some(builtin) = name.strip_prefix("builtins.") {
                let allowed = &self.question.builtins;
                if !allowed.is_empty() && !builtin.contains('.') && !allowed.contains(&builtin) {
                    self.add(Rule::Builtin, expr, builtin);
                }
            }
            if value.made.built {
                self.add(Rule::HiddenName, expr, name);
            }
        }
        known
    }

    /// An outermost string: what it contains, and whether it was built to hide a name.
    fn text(&mut self, expr: &Expr) {
        if place(expr).0 < self.told {
            return;
        }
        let value = self.names.value(expr);
        let Some(text) = value.as_text().map(str::to_owned) else { return };
        self.findings.budget().spend_searched(&text);
        self.told = place(expr).1;
        if let Some(kind) = secrets::in_text(&text) {
            self.findings.secret(place(expr), &text, kind);
        }
        if secrets::is_blob(&text) {
            self.add(Rule::Blob, expr, &format!("{} characters", text.chars().count()));
        }
        if paths::is_credential(&text) {
            self.add(Rule::Credentials, expr, &text);
        }
        if value.made.built && value.as_whole().is_some_and(tables::is_forbidden) {
            self.add(Rule::HiddenName, expr, &text);
        } else if tables::names_internals(&text) {
            self.add(Rule::Internals, expr, &text);
        }
    }

    /// `name = "…"`, also as an argument.
    fn named_text(&mut self, name: &str, value: &Expr) {
        if let Expr::StringLiteral(literal) = value
            && secrets::under_name(name, literal.value.to_str())
        {
            self.findings.secret(place(value), literal.value.to_str(), name);
        }
    }

    fn is_environment(&mut self, expr: &Expr) -> bool {
        self.names.readings(expr).iter().any(|value| value.as_name() == Some("os.environ"))
    }

    fn function(&mut self, name: &str, body: impl FnOnce(&mut Self)) {
        self.function.push(Function { name: name.to_owned(), forks: false, calls_itself: false });
        // A loop around a definition is no loop around its body.
        let (endless, vital) = (std::mem::take(&mut self.endless), std::mem::take(&mut self.vital));
        let outer = std::mem::take(&mut self.later);
        self.names.enter();
        body(self);
        self.functions();
        self.names.leave();
        self.later = outer;
        (self.endless, self.vital) = (endless, vital);
        self.function.pop();
    }

    /// Reads the functions of a scope, after all its names are bound.
    fn functions(&mut self) {
        for function in std::mem::take(&mut self.later) {
            // The body is elsewhere in the text.
            let told = std::mem::take(&mut self.told);
            self.function(function.name.as_str(), |walk| {
                walk.names.bind_parameters(&function.parameters);
                walk.visit_body(&function.body);
            });
            self.told = told;
        }
    }

    fn define(&mut self, function: &'a StmtFunctionDef) {
        function.decorator_list.iter().for_each(|decorator| self.visit_decorator(decorator));
        self.visit_parameters(&function.parameters);
        if let Some(returned) = &function.returns {
            self.visit_annotation(returned);
        }
        self.names.bind(function.name.as_str(), Value::default());
        self.later.push(function);
    }

    fn class(&mut self, class: &'a StmtClassDef) {
        class.decorator_list.iter().for_each(|decorator| self.visit_decorator(decorator));
        if let Some(arguments) = &class.arguments {
            self.visit_arguments(arguments);
        }
        // Its methods, which do not see its names, are read later.
        self.names.enter();
        self.visit_body(&class.body);
        self.names.leave();
        self.names.bind(class.name.as_str(), Value::default());
    }

    /// Code that may not run.
    fn branch(&mut self, read: impl FnOnce(&mut Self)) {
        self.names.enter();
        read(self);
        self.names.join();
    }

    /// A comprehension with its own names; `read` reads its elements.
    fn comprehension(&mut self, generators: &'a [Comprehension], read: impl FnOnce(&mut Self)) {
        let before = self.told;
        self.names.enter();
        for each in generators {
            self.visit_expr(&each.iter);
            self.visit_expr(&each.target);
            self.names.assign(&each.target, &Value::default());
            each.ifs.iter().for_each(|test| self.visit_expr(test));
        }
        // The element comes before the loops.
        let behind = std::mem::replace(&mut self.told, before);
        read(self);
        self.told = self.told.max(behind);
        self.names.leave();
    }

    fn loop_over_vital(&mut self, iterated: &Expr) -> bool {
        let Expr::Call(call) = iterated else { return false };
        let name = match self.names.value(&call.func).as_name() {
            Some("os.walk" | "os.listdir" | "os.scandir" | "glob.glob" | "glob.iglob") => {
                call.arguments.args.first().map(|path| self.names.value(path))
            }
            _ => match &*call.func {
                Expr::Attribute(attribute) if matches!(attribute.attr.as_str(), "rglob" | "glob" | "iterdir" | "walk") => {
                    Some(self.names.value(&attribute.value))
                }
                _ => None,
            },
        };
        name.is_some_and(|path| path.as_text().is_some_and(paths::is_vital))
    }
}

impl<'a> Visitor<'a> for Walk<'a, '_, '_> {
    fn visit_stmt(&mut self, stmt: &'a Stmt) {
        match stmt {
            Stmt::Import(import) => import.names.iter().for_each(|alias| self.import_alias(alias)),
            Stmt::ImportFrom(import) => {
                if let (Some(module), 0) = (&import.module, import.level) {
                    import.names.iter().for_each(|alias| self.import_from(module.as_str(), alias));
                }
            }
            Stmt::Assign(assign) => {
                self.visit_expr(&assign.value);
                let value = self.names.value(&assign.value);
                for target in &assign.targets {
                    if let Expr::Name(name) = target {
                        self.named_text(name.id.as_str(), &assign.value);
                    }
                    self.visit_expr(target);
                    self.names.assign(target, &value);
                }
            }
            Stmt::AnnAssign(assign) => {
                visitor::walk_stmt(self, stmt);
                if let Some(value) = &assign.value {
                    if let Expr::Name(name) = &*assign.target {
                        self.named_text(name.id.as_str(), value);
                    }
                    let value = self.names.value(value);
                    self.names.assign(&assign.target, &value);
                }
            }
            Stmt::AugAssign(assign) => {
                visitor::walk_stmt(self, stmt);
                // The result is unknown, its provenance is not.
                let made = self.names.value(&assign.value).made;
                self.names.assign(&assign.target, &Value::unknown(made));
            }
            Stmt::FunctionDef(function) => self.define(function),
            Stmt::ClassDef(class) => self.class(class),
            Stmt::If(branches) => {
                self.visit_expr(&branches.test);
                self.branch(|walk| walk.visit_body(&branches.body));
                branches.elif_else_clauses.iter().for_each(|clause| self.visit_elif_else_clause(clause));
            }
            Stmt::Try(attempt) => {
                self.branch(|walk| walk.visit_body(&attempt.body));
                attempt.handlers.iter().for_each(|handler| self.visit_except_handler(handler));
                self.branch(|walk| walk.visit_body(&attempt.orelse));
                self.visit_body(&attempt.finalbody);
            }
            Stmt::With(with) => {
                for item in &with.items {
                    self.visit_expr(&item.context_expr);
                    if let Some(target) = &item.optional_vars {
                        self.visit_expr(target);
                        let value = self.names.value(&item.context_expr);
                        self.names.assign(target, &value);
                    }
                }
                self.visit_body(&with.body);
            }
            Stmt::For(each) => {
                self.visit_expr(&each.iter);
                self.visit_expr(&each.target);
                let made = self.names.value(&each.iter).made;
                let vital = u32::from(self.loop_over_vital(&each.iter));
                self.vital += vital;
                self.branch(|walk| {
                    walk.names.assign(&each.target, &Value::unknown(made));
                    walk.visit_body(&each.body);
                });
                self.vital -= vital;
                self.branch(|walk| walk.visit_body(&each.orelse));
            }
            Stmt::While(each) => {
                self.visit_expr(&each.test);
                let endless = u32::from(match &*each.test {
                    Expr::BooleanLiteral(literal) => literal.value,
                    Expr::NumberLiteral(_) => true,
                    _ => false,
                });
                self.endless += endless;
                self.branch(|walk| walk.visit_body(&each.body));
                self.endless -= endless;
                self.branch(|walk| walk.visit_body(&each.orelse));
            }
            _ => visitor::walk_stmt(self, stmt),
        }
        self.findings.report_budget(place(stmt));
    }

    fn visit_elif_else_clause(&mut self, clause: &'a ElifElseClause) {
        self.branch(|walk| visitor::walk_elif_else_clause(walk, clause));
    }

    fn visit_except_handler(&mut self, handler: &'a ExceptHandler) {
        let ExceptHandler::ExceptHandler(inner) = handler;
        self.branch(|walk| {
            if let Some(name) = &inner.name {
                walk.names.bind(name.as_str(), Value::default());
            }
            visitor::walk_except_handler(walk, handler);
        });
    }

    fn visit_match_case(&mut self, case: &'a MatchCase) {
        self.branch(|walk| visitor::walk_match_case(walk, case));
    }

    fn visit_expr(&mut self, expr: &'a Expr) {
        if self.nested >= MAX_DEPTH {
            self.add(Rule::Screener, expr, "nested too deep");
            return;
        }
        self.nested += 1;
        self.expression(expr);
        self.nested -= 1;
    }
}

impl<'a> Walk<'a, '_, '_> {
    fn expression(&mut self, expr: &'a Expr) {
        match expr {
            Expr::Name(name) => {
                if name.ctx.is_load() {
                    self.reference(expr);
                    if name.id.as_str() == "__builtins__" {
                        self.add(Rule::Internals, expr, "__builtins__");
                    }
                    if self.is_environment(expr) {
                        self.add(Rule::Credentials, expr, "os.environ");
                    }
                }
                return;
            }
            Expr::Attribute(attribute) => {
                let name = attribute.attr.as_str();
                self.attribute(expr, &attribute.value, name);
                // A chain of attributes is reported as a whole, internals in it one by one.
                let mut base = &*attribute.value;
                while let Expr::Attribute(inner) = base {
                    self.attribute(expr, &inner.value, inner.attr.as_str());
                    base = &inner.value;
                }
                let of_environment = self.is_environment(&attribute.value);
                if self.is_environment(expr) || (of_environment && matches!(name, "items" | "values")) {
                    self.add(Rule::Credentials, expr, "the whole of os.environ");
                    return;
                }
                // `os.environ.get(…)` reads one variable only.
                if of_environment && matches!(name, "get" | "setdefault" | "pop" | "copy" | "update" | "keys") {
                    return;
                }
                if self.reference(expr) && base.is_name_expr() {
                    return;
                }
            }
            Expr::Subscript(subscript) => {
                self.reference(expr);
                self.text(expr);
                if self.is_environment(&subscript.value) {
                    self.visit_expr(&subscript.slice);
                    return;
                }
                if let Some("sys.modules") = self.names.value(&subscript.value).as_name() {
                    self.add(Rule::Internals, expr, "sys.modules");
                }
            }
            Expr::Compare(compare) => {
                // `"X" in os.environ` tests one name.
                for part in std::iter::once(&*compare.left).chain(&compare.comparators) {
                    if !self.is_environment(part) {
                        self.visit_expr(part);
                    }
                }
                return;
            }
            Expr::Dict(dict) => {
                for item in &dict.items {
                    // `{**os.environ, …}` builds a child's environment.
                    if item.key.is_some() || !self.is_environment(&item.value) {
                        item.key.iter().for_each(|key| self.visit_expr(key));
                        self.visit_expr(&item.value);
                    }
                    if let Some(Expr::StringLiteral(key)) = &item.key {
                        self.named_text(key.value.to_str(), &item.value);
                    }
                }
                return;
            }
            Expr::Call(call) => {
                self.call(expr, call);
                self.text(expr);
                return;
            }
            Expr::Lambda(lambda) => return self.lambda(lambda, &[]),
            Expr::StringLiteral(_) | Expr::BytesLiteral(_) => {
                self.text(expr);
                return;
            }
            Expr::FString(_) | Expr::BinOp(_) => self.text(expr),
            Expr::Named(named) => {
                self.visit_expr(&named.value);
                let value = self.names.value(&named.value);
                // It may not run, after `and` for example.
                self.branch(|walk| walk.names.assign(&named.target, &value));
                return;
            }
            Expr::ListComp(made) => return self.comprehension(&made.generators, |walk| walk.visit_expr(&made.elt)),
            Expr::SetComp(made) => return self.comprehension(&made.generators, |walk| walk.visit_expr(&made.elt)),
            Expr::Generator(made) => return self.comprehension(&made.generators, |walk| walk.visit_expr(&made.elt)),
            Expr::DictComp(made) => {
                return self.comprehension(&made.generators, |walk| {
                    made.key.iter().for_each(|key| walk.visit_expr(key));
                    walk.visit_expr(&made.value);
                });
            }
            _ => {}
        }
        visitor::walk_expr(self, expr);
    }
}
