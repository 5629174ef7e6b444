//! Activation checkpointing: parts of a network whose activations are computed again for the backward pass instead of being kept.
//!
//! Chen et al., 2016, <https://arxiv.org/abs/1604.06174>, as torch's `checkpoint`, but without operations inside a backward pass: a part first runs
//! outside of the graph. What goes on from there is a new leaf, and the [`Tape`] remembers how to go back: when the gradient of the
//! leaf is known, the part runs again from its input, and the scalar `sum(output * gradient)` goes backward, whose gradients are the chain rule. Parts are undone in
//! reverse order. Each runs the same operations on the same values as before, so the bits are those of the whole graph, wherever a parameter or a
//! boundary is used at most twice (a sum of two has no order).
//!
//! Networks say what their parts are ([`part`]); methods and the engine's other strategies know nothing of it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor};

use super::macs::uncounted;
use super::pass::Pass;

thread_local! {
    static TAPE: RefCell<Option<Tape>> = const { RefCell::new(None) };
    /// Blocks that a part consists of.
    static BLOCKS: Cell<usize> = const { Cell::new(1) };
}

/// What was cut off during a forward pass, and how to go back through it.
#[derive(Default)]
pub struct Tape {
    parts: Vec<Part>,
}

/// Takes what a backward pass left.
type HandOver<'a> = &'a mut dyn FnMut(Gradients);

struct Part {
    /// Takes what a backward pass left for the part's output.
    collect: Box<dyn FnMut(&mut Gradients)>,
    /// Runs the part again and backward, if a gradient has come to its output; hands over what each backward pass left.
    back: Box<dyn FnOnce(HandOver<'_>)>,
}

impl std::fmt::Debug for Tape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tape of {} parts", self.parts.len())
    }
}

/// Runs a forward pass whose parts, of so many blocks each, drop their activations.
pub fn recomputed<R>(blocks: usize, pass: impl FnOnce() -> R) -> (R, Tape) {
    BLOCKS.set(blocks.max(1));
    TAPE.set(Some(Tape::default()));
    let result = pass();
    (result, TAPE.take().unwrap_or_default())
}

impl Tape {
    /// Goes backward from a scalar, through all parts; `take` takes the gradients of parameters, each time those of some of them.
    pub fn backward(mut self, scalar: &Tensor<1>, take: &mut dyn FnMut(&mut Gradients)) {
        let mut arrived = |gradients: &mut Gradients, parts: &mut [Part]| {
            take(gradients);
            for part in parts {
                (part.collect)(gradients);
            }
        };
        arrived(&mut scalar.backward(), &mut self.parts);
        while let Some(part) = self.parts.pop() {
            let parts = &mut self.parts;
            (part.back)(&mut |mut gradients| arrived(&mut gradients, parts));
        }
    }
}

/// Returns how many blocks a part has; nothing where everything is kept.
pub(super) fn blocks() -> Option<usize> {
    TAPE.with_borrow(Option::is_some).then(|| BLOCKS.get())
}

/// Runs a part of a network without keeping what is inside it, while [`recomputed`]. [`blocks`] tells whether that is so.
///
/// `run` gets `net` itself, or a copy outside of autodiff: burn frees a graph when something goes backward through it, so one that is not needed must not come
/// about. It must do the same each time it is called with the same pass: it sees the keys of the pass's draws, and what it tells the second one is dropped.
pub(super) fn part<M: Module + 'static, const D: usize, const E: usize>(
    net: &Rc<M>,
    x: Tensor<D>,
    pass: &mut Pass,
    run: impl Fn(&M, Tensor<D>, &mut Pass) -> Tensor<E> + 'static,
) -> Tensor<E> {
    let tracked = x.is_tracked();
    if !tracked && !is_trained(net.as_ref()) {
        return run(net, x, pass);
    }
    let again = pass.again();
    let input = x.clone().without_autodiff();
    // work that is done twice is counted once
    let output = uncounted(|| run(&net.valid(), input.clone(), pass));
    let output = Tensor::from_inner(output).require_grad();
    let gradient: Rc<RefCell<Option<Tensor<E>>>> = Rc::default();
    let (collected, end) = (Rc::clone(&gradient), output.clone());
    let collect = Box::new(move |gradients: &mut Gradients| {
        if let Some(new) = end.grad_remove(gradients) {
            let mut sum = collected.borrow_mut();
            *sum = Some(match sum.take() {
                Some(sum) => sum + new,
                None => new,
            });
        }
    });
    let net = Rc::clone(net);
    let back = Box::new(move |hand_over: HandOver<'_>| {
        let Some(gradient) = gradient.borrow_mut().take() else { return };
        let (mut pass, leaf) = (again, Tensor::from_inner(input));
        let leaf = if tracked { leaf.require_grad() } else { leaf };
        let y = run(&net, leaf.clone(), &mut pass);
        let mut gradients = (y * Tensor::from_inner(gradient)).sum().backward();
        let upstream = if tracked { leaf.grad_remove(&mut gradients) } else { None };
        hand_over(gradients);
        if let Some(upstream) = upstream {
            hand_over((x * Tensor::from_inner(upstream)).sum().backward());
        }
    });
    TAPE.with_borrow_mut(|tape| {
        if let Some(tape) = tape {
            tape.parts.push(Part { collect, back });
        }
    });
    output
}

/// Tells whether a gradient flows to any parameter.
fn is_trained<M: Module>(net: &M) -> bool {
    struct Any(bool);
    impl ModuleVisitor for Any {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0 |= param.val().is_require_grad();
        }
    }
    let mut any = Any(false);
    net.visit(&mut any);
    any.0
}
