//! What the names of a Python program stand for, by all that binds them.
//!
//! A name is what any binding of it may have made it. An earlier meaning is gone only where
//! another surely takes its place: a parameter, or an assignment in the same block. What a
//! branch, a loop or another scope binds stands beside what was there before, and the body
//! of a function is read when all around it is bound, since that is when it may run. What
//! is bound, and bound again where a branch ends, is work ([`Work`]); when none is left,
//! names keep what they were bound to.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    rc::Rc,
};

use ruff_python_ast::{Expr, Parameters};

use super::{
    tables,
    value::{Value, What},
};
use crate::work::Work;

/// Meanings of one name that are kept beside the last.
const MOST_OTHERS: usize = 3;
/// What it takes to bind a name, and to keep what it was bound to before.
const BOUND: usize = 4;

/// What one name stands for.
#[derive(Clone)]
struct Bound {
    value: Value,
    /// What it may be as well, of what rules know by its name.
    others: Vec<Value>,
}

impl Bound {
    fn surely(value: Value) -> Self {
        Bound { value, others: Vec::new() }
    }

    /// One of these, the oldest first.
    fn either(all: impl Iterator<Item = Bound>) -> Self {
        let (mut telling, mut last): (Vec<Value>, _) = (Vec::new(), Value::default());
        for value in all.flat_map(|bound| bound.others.into_iter().chain([bound.value])) {
            if tells(&value) {
                telling.retain(|other| *other != value);
                telling.push(value);
                // Older ones are not kept, however often a name is bound.
                telling.drain(..telling.len().saturating_sub(MOST_OTHERS + 1));
            } else if value != Value::default() {
                last = value;
            }
        }
        let value = telling.pop().unwrap_or(last);
        Bound { value, others: telling }
    }
}

/// Whether a value is known by a name, which rules may know.
pub(super) fn tells(value: &Value) -> bool {
    matches!(value.what, What::Name(_) | What::Namespace(_) | What::Getter(_))
}

/// The names of a program, at one place of it.
pub(super) struct Names {
    pub(super) work: Rc<Work>,
    bound: HashMap<String, Bound>,
    /// Attributes of what has a name, `self.os`: whoever sets them, and for good.
    attributes: HashMap<String, Bound>,
    /// What was bound before, one for each binding.
    undo: Vec<(String, Option<Bound>)>,
    /// Names that functions bind around themselves.
    shared: HashSet<String>,
}

impl Names {
    pub(super) fn new(work: Rc<Work>) -> Self {
        Names { work, bound: HashMap::new(), attributes: HashMap::new(), undo: Vec::new(), shared: HashSet::new() }
    }

    pub(super) fn bind(&mut self, name: &str, value: Value) {
        if !self.work.take(BOUND) {
            return;
        }
        if self.shared.contains(name) {
            let before = self.bound.remove(name);
            self.bound.insert(name.to_owned(), Bound::either(before.into_iter().chain([Bound::surely(value)])));
            return;
        }
        let before = self.bound.insert(name.to_owned(), Bound::surely(value));
        self.undo.push((name.to_owned(), before));
    }

    /// Functions bind this name around themselves.
    pub(super) fn share(&mut self, name: &str) {
        self.shared.insert(name.to_owned());
    }

    /// A scope or a branch begins.
    pub(super) fn enter(&mut self) -> usize {
        self.undo.len()
    }

    /// A scope ends, and what is bound in it.
    pub(super) fn leave(&mut self, mark: usize) {
        for (name, before) in self.undo.drain(mark..).rev() {
            match before {
                Some(bound) => self.bound.insert(name, bound),
                None => self.bound.remove(&name),
            };
        }
    }

    /// A branch ends, which need not have been taken.
    pub(super) fn join(&mut self, mark: usize) {
        for (name, mut befores) in self.bindings(mark).into_iter().flatten() {
            let now = self.bound.remove(&name);
            let first = befores.first().cloned().flatten();
            if let Some(missing) = befores.first_mut().filter(|before| before.is_none()) {
                *missing = Some(Bound::surely(unbound(&name)));
            }
            self.bound.insert(name.clone(), Bound::either(befores.into_iter().flatten().chain(now)));
            self.undo.push((name, first));
        }
    }

    /// All of a scope is bound: each name is whatever it was made there.
    pub(super) fn settle(&mut self, mark: usize) {
        for (name, befores) in self.bindings(mark).into_iter().flatten() {
            let now = self.bound.remove(&name);
            let mut befores = befores.into_iter();
            let first = befores.next().flatten();
            self.bound.insert(name.clone(), Bound::either(befores.flatten().chain(now)));
            self.undo.push((name, first));
        }
    }

    /// What was bound before each of the bindings since then, to be bound together; none
    /// where that is too much work.
    fn bindings(&mut self, mark: usize) -> Option<BTreeMap<String, Vec<Option<Bound>>>> {
        if !self.work.take(self.undo.len().saturating_sub(mark).saturating_mul(BOUND)) {
            return None;
        }
        let mut bindings: BTreeMap<String, Vec<Option<Bound>>> = BTreeMap::new();
        for (name, before) in self.undo.drain(mark..) {
            bindings.entry(name).or_default().push(before);
        }
        Some(bindings)
    }

    /// The body of a class ends: what it binds are attributes of the class, and of what is
    /// made of it.
    pub(super) fn leave_class(&mut self, mark: usize, class: &str) {
        let names: HashSet<String> = self.undo.get(mark..).unwrap_or_default().iter().map(|(name, _)| name.clone()).collect();
        for name in names {
            let value = self.look_up(&name);
            if tells(&value) {
                [class, "self", "cls"].iter().for_each(|owner| self.bind_attribute(owner, &name, value.clone()));
            }
        }
        self.leave(mark);
    }

    pub(super) fn bind_parameters(&mut self, parameters: &Parameters) {
        for parameter in parameters.posonlyargs.iter().chain(&parameters.args).chain(&parameters.kwonlyargs) {
            let value = parameter.default.as_deref().map(|default| self.value(default)).unwrap_or_default();
            self.bind(parameter.parameter.name.as_str(), value);
        }
        for parameter in parameters.vararg.iter().chain(&parameters.kwarg) {
            self.bind(parameter.name.as_str(), Value::default());
        }
    }

    fn bind_attribute(&mut self, owner: &str, attribute: &str, value: Value) {
        // The name of a class may be long, and stands before each of its attributes.
        if !self.work.take(BOUND + owner.len()) {
            return;
        }
        let key = format!("{owner}.{attribute}");
        let before = self.attributes.remove(&key);
        self.attributes.insert(key, Bound::either(before.into_iter().chain([Bound::surely(value)])));
    }

    /// What somebody has set an attribute of what has this name to.
    pub(super) fn set_attribute(&self, owner: &str, attribute: &str) -> Option<Value> {
        self.attributes.get(&format!("{owner}.{attribute}")).map(|bound| bound.value.clone())
    }

    /// Binds whatever an assignment assigns to.
    pub(super) fn assign(&mut self, target: &Expr, value: &Value) {
        match target {
            Expr::Name(name) => self.bind(name.id.as_str(), value.clone()),
            Expr::Attribute(attribute) => {
                if let Expr::Name(name) = &*attribute.value {
                    self.bind_attribute(name.id.as_str(), attribute.attr.as_str(), value.clone());
                }
            }
            Expr::Tuple(tuple) => self.assign_all(&tuple.elts, value),
            Expr::List(list) => self.assign_all(&list.elts, value),
            Expr::Starred(starred) => self.assign(&starred.value, &Value::default()),
            _ => {}
        }
    }

    fn assign_all(&mut self, targets: &[Expr], value: &Value) {
        for (at, target) in targets.iter().enumerate() {
            let item = value.items().get(at).cloned().unwrap_or(Value { what: What::Unknown, made: value.made });
            self.assign(target, &item);
        }
    }

    /// What a bare name stands for.
    pub(super) fn look_up(&self, name: &str) -> Value {
        self.bound.get(name).map_or_else(|| unbound(name), |bound| bound.value.clone())
    }

    /// All that an expression may stand for, by each meaning of the name that it begins with.
    pub(super) fn readings(&mut self, expr: &Expr) -> Vec<Value> {
        let mut readings = vec![self.value(expr)];
        let Some(name) = first_name(expr) else { return readings };
        for at in 0..self.bound.get(name).map_or(0, |bound| bound.others.len()) {
            self.turn(name, at);
            let value = self.value(expr);
            self.turn(name, at);
            if !readings.contains(&value) {
                readings.push(value);
            }
        }
        readings
    }

    /// Exchanges the meaning of a name for another one.
    fn turn(&mut self, name: &str, at: usize) {
        if let Some(Bound { value, others }) = self.bound.get_mut(name)
            && let Some(other) = others.get_mut(at)
        {
            std::mem::swap(value, other);
        }
    }
}

/// What a name stands for that the program has not bound.
fn unbound(name: &str) -> Value {
    match name {
        "__builtins__" => Value::name("builtins"),
        "__file__" => Value::name("__file__"),
        name if tables::is_builtin(name) => Value::name(format!("builtins.{name}")),
        _ => Value::default(),
    }
}

/// The name that an expression begins with.
fn first_name(expr: &Expr) -> Option<&str> {
    let mut at = expr;
    loop {
        at = match at {
            Expr::Name(name) => return Some(name.id.as_str()),
            Expr::Attribute(attribute) => &attribute.value,
            Expr::Subscript(subscript) => &subscript.value,
            Expr::Call(call) => &call.func,
            _ => return None,
        }
    }
}
