//! From burn's tensors to slices and back, and into burn's graph.

use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{Autodiff, Flex};
use burn::tensor::{Bytes, DType, Shape, Tensor};

/// An input of an operation: contiguous `f32` values and, on an autodiff device, its node in the graph.
#[derive(Debug)]
pub(super) struct Operand {
    values: FlexTensor,
    node: Option<NodeGuard>,
    tracked: bool,
}

impl Operand {
    /// Unwraps a tensor, copying it if it is a view with gaps. `graph` tells whether the operation takes part in autodiff:
    /// true if any input of the operation is on an autodiff device; the other inputs are then constants.
    ///
    /// Returns nothing for what these operations do not handle: other devices, other precisions, checkpointed graphs, and
    /// when the recipe asks for burn's operations.
    pub(super) fn new<const D: usize>(tensor: Tensor<D>, graph: bool) -> Option<Self> {
        if tensor.dtype() != DType::F32 || super::config::is_plain() {
            return None;
        }
        let tracked = tensor.is_tracked();
        let (values, node) = if graph {
            let (values, node) = tensor.autodiff().try_into_primitive::<Autodiff<Flex>>().ok()?.into_parts();
            (values, Some(node))
        } else {
            (tensor.try_into_primitive::<Flex>().ok()?, None)
        };
        Some(Self { values: contiguous(values), node, tracked })
    }

    /// Tells whether a gradient will flow to or through this input.
    pub(super) fn is_tracked(&self) -> bool {
        self.tracked
    }

    /// Returns the values, row-major.
    pub(super) fn slice(&self) -> &[f32] {
        slice(&self.values)
    }

    /// Shares the values, for the backward pass.
    pub(super) fn share(&self) -> FlexTensor {
        self.values.clone()
    }
}

/// Makes the output tensor and records the operation, if any input is in the graph.
///
/// `state` is asked for only if a gradient will flow.
pub(super) fn record<B, const N: usize, const D: usize>(
    backward: B,
    operands: [Operand; N],
    output: FlexTensor,
    state: impl FnOnce(&FlexTensor) -> B::State,
) -> Tensor<D>
where
    B: Backward<Flex, N>,
{
    if operands.iter().any(|operand| operand.node.is_none()) {
        return Tensor::from_primitive::<Flex>(output);
    }
    let nodes = operands.map(|operand| operand.node.expect("checked above: every operand has a node"));
    let tensor = match backward.prepare::<NoCheckpointing>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(state(&output), output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(tensor)
}

/// Takes the gradient that arrived at an operation's output.
pub(super) fn consume<S, const N: usize>(grads: &mut Gradients, ops: &Ops<S, N>) -> FlexTensor {
    contiguous(grads.consume::<Flex>(&ops.node))
}

/// Tells whether an input exists and wants a gradient.
pub(super) fn wants<S, const N: usize>(ops: &Ops<S, N>, input: usize) -> bool {
    ops.parents.get(input).is_some_and(Option::is_some)
}

/// Hands a gradient to an input, if that wants one.
pub(super) fn register<S, const N: usize>(
    grads: &mut Gradients,
    ops: &Ops<S, N>,
    input: usize,
    gradient: impl FnOnce() -> FlexTensor,
) {
    if let Some(Some(node)) = ops.parents.get(input) {
        grads.register::<Flex>(node.id, gradient());
    }
}

/// Wraps values as a tensor primitive.
pub(super) fn primitive<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> FlexTensor {
    assert_eq!(values.len(), shape.iter().product::<usize>(), "values do not fill the shape {shape:?}");
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(Shape::from(shape)), DType::F32)
}

/// Wraps values as a tensor without autodiff.
pub(super) fn plain<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<D> {
    Tensor::from_primitive::<Flex>(primitive(values, shape))
}

/// Returns the values of a contiguous primitive.
pub(super) fn slice(tensor: &FlexTensor) -> &[f32] {
    if tensor.layout().num_elements() == 0 {
        return &[];
    }
    tensor.as_slice::<f32>().expect("operands are contiguous f32: Operand::new and consume see to it")
}

fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}
