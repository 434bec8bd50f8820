//! What the names of a Python program are bound to.
//!
//! A binding replaces an earlier one only where it surely takes effect: a parameter, or an
//! assignment in the same block. A binding in a branch or a loop is kept beside the earlier ones.
//! Binding costs [`Budget`]; when it is spent, names keep their bindings.

use std::{collections::HashMap, rc::Rc};

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
/// Layers that can be searched at the cost of 1.
const SEARCHED: usize = 4;

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

    /// One of both, the later one last.
    fn either(before: Bound, after: Bound) -> Self {
        let (mut telling, mut last): (Vec<Value>, _) = (Vec::new(), Value::default());
        for value in [before, after].into_iter().flat_map(|bound| bound.others.into_iter().chain([bound.value])) {
            if is_meaningful(&value) {
                telling.retain(|other| *other != value);
                telling.push(value);
            } else if value != Value::default() {
                last = value;
            }
        }
        // The oldest are dropped.
        telling.drain(..telling.len().saturating_sub(MAX_OTHERS + 1));
        let value = telling.pop().unwrap_or(last);
        Bound { value, others: telling }
    }
}

/// Whether a value has a name that rules may know.
fn is_meaningful(value: &Value) -> bool {
    matches!(value.what, AbstractValue::Name(_) | AbstractValue::Getter(_))
}

/// The names that are bound at one place of a program.
pub(super) struct Names {
    pub(super) budget: Rc<Budget>,
    /// One for each scope and branch around this place, the innermost last.
    layers: Vec<HashMap<String, Bound>>,
}

impl Names {
    pub(super) fn new(budget: Rc<Budget>) -> Self {
        Names { budget, layers: vec![HashMap::new()] }
    }

    pub(super) fn bind(&mut self, name: &str, value: Value) {
        if self.budget.spend(BOUND)
            && let Some(layer) = self.layers.last_mut()
        {
            layer.insert(name.to_owned(), Bound::surely(value));
        }
    }

    /// A scope or a branch begins.
    pub(super) fn enter(&mut self) {
        self.layers.push(HashMap::new());
    }

    /// A scope ends with its bindings.
    pub(super) fn leave(&mut self) {
        self.layers.pop();
    }

    /// A branch ends that may not have run.
    pub(super) fn join(&mut self) {
        let branch = self.layers.pop().unwrap_or_default();
        if !self.budget.spend(branch.len().saturating_mul(BOUND)) {
            return;
        }
        for (name, after) in branch {
            let before = self.find(&name).cloned().unwrap_or_else(|| Bound::surely(unbound(&name)));
            if let Some(layer) = self.layers.last_mut() {
                layer.insert(name, Bound::either(before, after));
            }
        }
    }

    pub(super) fn bind_parameters(&mut self, parameters: &Parameters) {
        parameters.iter().for_each(|parameter| self.bind(parameter.name().as_str(), Value::default()));
    }

    /// Binds the targets of an assignment.
    pub(super) fn assign(&mut self, target: &Expr, value: &Value) {
        match target {
            Expr::Name(name) => self.bind(name.id.as_str(), value.clone()),
            Expr::Tuple(tuple) => self.assign_all(&tuple.elts, value),
            Expr::List(list) => self.assign_all(&list.elts, value),
            Expr::Starred(starred) => self.assign(&starred.value, &Value::default()),
            _ => {}
        }
    }

    fn assign_all(&mut self, targets: &[Expr], value: &Value) {
        for (at, target) in targets.iter().enumerate() {
            let item = value.items().get(at).cloned().unwrap_or(Value::unknown(value.made));
            self.assign(target, &item);
        }
    }

    fn find(&self, name: &str) -> Option<&Bound> {
        self.budget.spend(self.layers.len() / SEARCHED);
        self.layers.iter().rev().find_map(|layer| layer.get(name))
    }

    /// The value of a name.
    pub(super) fn look_up(&self, name: &str) -> Value {
        self.find(name).map_or_else(|| unbound(name), |bound| bound.value.clone())
    }

    /// All values of an expression, for each value of its first name.
    pub(super) fn readings(&mut self, expr: &Expr) -> Vec<Value> {
        let mut readings = vec![self.value(expr)];
        let Some(name) = first_name(expr) else { return readings };
        let others = self.find(name).map(|bound| bound.others.clone()).unwrap_or_default();
        for other in others {
            self.layers.push(HashMap::from([(name.to_owned(), Bound::surely(other))]));
            let value = self.value(expr);
            self.layers.pop();
            if !readings.contains(&value) {
                readings.push(value);
            }
        }
        readings
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
