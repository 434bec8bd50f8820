//! What the names of a Python program are bound to.
//!
//! A binding replaces an earlier one only where it surely takes effect: a parameter, or an
//! assignment in the same block. A binding in a branch, a loop or another scope is kept beside the
//! earlier ones. The body of a function is read after the scope around it. Binding costs
//! [`Budget`]; when it is spent, names keep their bindings.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    rc::Rc,
};

use ruff_python_ast::{Expr, Parameters};

use super::{
    tables,
    value::{AbstractValue, Value},
};
use crate::budget::Budget;

/// Bindings of one name that are kept beside the last.
const MAX_OTHERS: usize = 3;
/// The cost of binding a name.
const BOUND: usize = 4;

/// The bindings of one name.
#[derive(Clone)]
struct Bound {
    value: Value,
    /// Other possible values that rules may know.
    others: Vec<Value>,
}

impl Bound {
    fn surely(value: Value) -> Self {
        Bound { value, others: Vec::new() }
    }

    /// One of these, in order of their age.
    fn either(all: impl Iterator<Item = Bound>) -> Self {
        let (mut telling, mut last): (Vec<Value>, _) = (Vec::new(), Value::default());
        for value in all.flat_map(|bound| bound.others.into_iter().chain([bound.value])) {
            if is_meaningful(&value) {
                telling.retain(|other| *other != value);
                telling.push(value);
                // The oldest are dropped.
                telling.drain(..telling.len().saturating_sub(MAX_OTHERS + 1));
            } else if value != Value::default() {
                last = value;
            }
        }
        let value = telling.pop().unwrap_or(last);
        Bound { value, others: telling }
    }
}

/// Whether a value has a name that rules may know.
pub(super) fn is_meaningful(value: &Value) -> bool {
    matches!(value.what, AbstractValue::Name(_) | AbstractValue::Namespace(_) | AbstractValue::Getter(_))
}

/// The names that are bound at one place of a program.
pub(super) struct Names {
    pub(super) budget: Rc<Budget>,
    bound: HashMap<String, Bound>,
    /// Attributes of named objects, such as `self.os`, in all scopes.
    attributes: HashMap<String, Bound>,
    /// The former value of each binding, to undo it.
    undo: Vec<(String, Option<Bound>)>,
    /// Names that functions declare `global`.
    shared: HashSet<String>,
}

impl Names {
    pub(super) fn new(budget: Rc<Budget>) -> Self {
        Names { budget, bound: HashMap::new(), attributes: HashMap::new(), undo: Vec::new(), shared: HashSet::new() }
    }

    pub(super) fn bind(&mut self, name: &str, value: Value) {
        if !self.budget.spend(BOUND) {
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

    /// A function declares this name `global`.
    pub(super) fn share(&mut self, name: &str) {
        self.shared.insert(name.to_owned());
    }

    /// A scope or a branch begins.
    pub(super) fn enter(&mut self) -> usize {
        self.undo.len()
    }

    /// A scope ends with its bindings.
    pub(super) fn leave(&mut self, mark: usize) {
        for (name, before) in self.undo.drain(mark..).rev() {
            match before {
                Some(bound) => self.bound.insert(name, bound),
                None => self.bound.remove(&name),
            };
        }
    }

    /// A branch ends that may not have run.
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

    /// A scope is complete: each name has all values that the scope binds.
    pub(super) fn settle(&mut self, mark: usize) {
        for (name, befores) in self.bindings(mark).into_iter().flatten() {
            let now = self.bound.remove(&name);
            let mut befores = befores.into_iter();
            let first = befores.next().flatten();
            self.bound.insert(name.clone(), Bound::either(befores.flatten().chain(now)));
            self.undo.push((name, first));
        }
    }

    /// The former values of all bindings since `mark`, by name; none where the budget is
    /// spent.
    fn bindings(&mut self, mark: usize) -> Option<BTreeMap<String, Vec<Option<Bound>>>> {
        if !self.budget.spend(self.undo.len().saturating_sub(mark).saturating_mul(BOUND)) {
            return None;
        }
        let mut bindings: BTreeMap<String, Vec<Option<Bound>>> = BTreeMap::new();
        for (name, before) in self.undo.drain(mark..) {
            bindings.entry(name).or_default().push(before);
        }
        Some(bindings)
    }

    /// The body of a class ends: its bindings are attributes of the class and its instances.
    pub(super) fn leave_class(&mut self, mark: usize, class: &str) {
        let names: HashSet<String> = self.undo.get(mark..).unwrap_or_default().iter().map(|(name, _)| name.clone()).collect();
        for name in names {
            let value = self.look_up(&name);
            if is_meaningful(&value) {
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
        // A long class name is copied for each attribute.
        if !self.budget.spend(BOUND + owner.len()) {
            return;
        }
        let key = format!("{owner}.{attribute}");
        let before = self.attributes.remove(&key);
        self.attributes.insert(key, Bound::either(before.into_iter().chain([Bound::surely(value)])));
    }

    /// The value to which the program sets an attribute of this name.
    pub(super) fn set_attribute(&self, owner: &str, attribute: &str) -> Option<Value> {
        self.attributes.get(&format!("{owner}.{attribute}")).map(|bound| bound.value.clone())
    }

    /// Binds the targets of an assignment.
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
            let item = value.items().get(at).cloned().unwrap_or(Value { what: AbstractValue::Unknown, made: value.made });
            self.assign(target, &item);
        }
    }

    /// The value of a name.
    pub(super) fn look_up(&self, name: &str) -> Value {
        self.bound.get(name).map_or_else(|| unbound(name), |bound| bound.value.clone())
    }

    /// All values of an expression, for each value of its first name.
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

    /// Swaps the value of a name with another one.
    fn turn(&mut self, name: &str, at: usize) {
        if let Some(Bound { value, others }) = self.bound.get_mut(name)
            && let Some(other) = others.get_mut(at)
        {
            std::mem::swap(value, other);
        }
    }
}

/// The value of a name that the program has not bound.
fn unbound(name: &str) -> Value {
    match name {
        "__builtins__" => Value::name("builtins"),
        "__file__" => Value::name("__file__"),
        name if tables::is_builtin(name) => Value::name(format!("builtins.{name}")),
        _ => Value::default(),
    }
}

/// The first name of an expression.
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
