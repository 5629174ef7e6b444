//! Layers as nodes, under the paths that they have in the network.

use super::graph::Attribute::{Float, Int, Ints};
use super::graph::{Graph, Value};
use crate::model::Tensors;

/// torch's epsilon of batch norms, which all of ours have (`model::layers::BatchNorm`).
const BATCH_NORM_EPS: f32 = 1e-5;

/// A graph that is built from the tensors of a network.
pub(super) struct Builder<'a> {
    pub(super) graph: Graph,
    tensors: &'a Tensors,
}

/// A square kernel.
#[derive(Clone, Copy)]
pub(super) struct Window {
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) padding: usize,
}

impl Window {
    /// Windows side by side.
    pub(super) fn tiles(side: usize) -> Self {
        Self { kernel: side, stride: side, padding: 0 }
    }

    fn attributes(self) -> [(&'static str, super::graph::Attribute); 3] {
        let all = |value: usize, count: usize| Ints(vec![int(value); count]);
        [("kernel_shape", all(self.kernel, 2)), ("strides", all(self.stride, 2)), ("pads", all(self.padding, 4))]
    }
}

/// A size as ONNX has it.
pub(super) fn int(value: usize) -> i64 {
    value.cast_signed() as i64
}

impl<'a> Builder<'a> {
    pub(super) fn new(tensors: &'a Tensors) -> Self {
        Self { graph: Graph::default(), tensors }
    }

    /// Shape and values of a tensor of the network.
    pub(super) fn tensor(&self, name: &str) -> (&'a [usize], &'a [f32]) {
        let (shape, values) =
            self.tensors.get(name).unwrap_or_else(|| panic!("`{name}`: `export` checked the tensors"));
        (shape, values)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Adds a tensor as it is.
    fn weights(&mut self, name: &str) -> Value {
        let (shape, values) = self.tensor(name);
        self.graph.weights(name, shape, values)
    }

    /// A linear layer on the last side of `x`; `scale` names a tensor that multiplies its outputs, which goes into the weights.
    pub(super) fn linear(&mut self, path: &str, x: &Value, scale: Option<&str>) -> Value {
        let (shape, weight) = self.tensor(&format!("{path}.weight"));
        let (outputs, inputs) = (shape[0], shape[1]);
        let scale = scale.map(|name| self.tensor(name).1);
        let scaled = |row: usize, value: f32| scale.map_or(value, |scale| scale[row] * value);
        // [in, out], as `MatMul` takes it
        let transposed: Vec<f32> = (0..inputs * outputs)
            .map(|index| (index / outputs, index % outputs))
            .map(|(column, row)| scaled(row, weight[row * inputs + column]))
            .collect();
        let weight = self.graph.weights(&format!("{path}.weight"), &[inputs, outputs], &transposed);
        let y = self.graph.node(path, "MatMul", &[x, &weight], &[]);
        let name = format!("{path}.bias");
        if !self.has(&name) {
            return y;
        }
        let bias: Vec<f32> = self.tensor(&name).1.iter().enumerate().map(|(row, &value)| scaled(row, value)).collect();
        let bias = self.graph.weights(&name, &[outputs], &bias);
        self.graph.node(path, "Add", &[&y, &bias], &[])
    }

    /// Norm over the last side of `x`.
    pub(super) fn layer_norm(&mut self, path: &str, x: &Value, eps: f64) -> Value {
        let (weight, bias) = (self.weights(&format!("{path}.weight")), self.weights(&format!("{path}.bias")));
        let attributes = [("axis", Int(-1)), ("epsilon", Float(eps as f32))];
        self.graph.node(path, "LayerNormalization", &[x, &weight, &bias], &attributes)
    }

    /// Batch norm by running statistics.
    pub(super) fn batch_norm(&mut self, path: &str, x: &Value) -> Value {
        let [weight, bias, mean, var] =
            ["weight", "bias", "running_mean", "running_var"].map(|leaf| self.weights(&format!("{path}.{leaf}")));
        let attributes = [("epsilon", Float(BATCH_NORM_EPS))];
        self.graph.node(path, "BatchNormalization", &[x, &weight, &bias, &mean, &var], &attributes)
    }

    /// A convolution of `[batch, channels, h, w]`.
    pub(super) fn conv(&mut self, path: &str, x: &Value, window: Window, groups: usize) -> Value {
        let weight = self.weights(&format!("{path}.weight"));
        let name = format!("{path}.bias");
        let bias = self.has(&name).then(|| self.weights(&name));
        let inputs: Vec<&Value> = [x, &weight].into_iter().chain(&bias).collect();
        let attributes: Vec<_> = window.attributes().into_iter().chain([("group", Int(int(groups)))]).collect();
        self.graph.node(path, "Conv", &inputs, &attributes)
    }

    pub(super) fn max_pool(&mut self, at: &str, x: &Value, window: Window) -> Value {
        self.graph.node(at, "MaxPool", &[x], &window.attributes())
    }

    /// Mean over height and width, `[batch, channels]`.
    pub(super) fn mean_pool(&mut self, at: &str, x: &Value) -> Value {
        let x = self.graph.node(at, "GlobalAveragePool", &[x], &[]);
        self.graph.node(at, "Flatten", &[&x], &[("axis", Int(1))])
    }

    /// `x (1 + erf(x / sqrt(2))) / 2`: the operator `Gelu` is younger than the operators here (opset 20).
    pub(super) fn gelu(&mut self, at: &str, x: &Value) -> Value {
        let (root, one, half) =
            (self.graph.number(std::f32::consts::SQRT_2), self.graph.number(1.0), self.graph.number(0.5));
        let y = self.graph.node(at, "Div", &[x, &root], &[]);
        let y = self.graph.node(at, "Erf", &[&y], &[]);
        let y = self.graph.node(at, "Add", &[&y, &one], &[]);
        let y = self.graph.node(at, "Mul", &[x, &y], &[]);
        self.graph.node(at, "Mul", &[&y, &half], &[])
    }

    pub(super) fn add(&mut self, at: &str, x: &Value, y: &Value) -> Value {
        self.graph.node(at, "Add", &[x, y], &[])
    }

    pub(super) fn mul(&mut self, at: &str, x: &Value, y: &Value) -> Value {
        self.graph.node(at, "Mul", &[x, y], &[])
    }

    /// Reshapes; 0 keeps a side, -1 is what is left.
    pub(super) fn reshape(&mut self, at: &str, x: &Value, shape: &[i64]) -> Value {
        let shape = self.graph.list(shape);
        self.graph.node(at, "Reshape", &[x, &shape], &[])
    }

    pub(super) fn transpose(&mut self, at: &str, x: &Value, sides: &[i64]) -> Value {
        self.graph.node(at, "Transpose", &[x], &[("perm", Ints(sides.to_vec()))])
    }

    pub(super) fn concat(&mut self, at: &str, parts: &[&Value], axis: i64) -> Value {
        self.graph.node(at, "Concat", parts, &[("axis", Int(axis))])
    }

    /// Cuts the last side into equal parts.
    pub(super) fn split<const N: usize>(&mut self, at: &str, x: &Value) -> [Value; N] {
        self.graph.nodes(at, "Split", &[x], &[("axis", Int(-1))])
    }
}
