//! An ONNX graph while it is built: nodes in order, each of values that are there already.
//!
//! Field numbers are those of <https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>.

use std::collections::BTreeMap;

use super::proto::Message;

/// Something that a node takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Value(String);

/// A setting of a node.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Attribute {
    Int(i64),
    Float(f32),
    Ints(Vec<i64>),
}

impl Attribute {
    /// `AttributeProto`: name 1, f 2, i 3, ints 8, type 20 (FLOAT 1, INT 2, INTS 7).
    fn encode(&self, name: &str) -> Message {
        let message = Message::default().text(1, name);
        match self {
            Self::Float(value) => message.float(2, *value).int(20, 1),
            Self::Int(value) => message.int(3, *value).int(20, 2),
            Self::Ints(values) => message.ints(8, values).int(20, 7),
        }
    }
}

#[derive(Clone, Debug)]
struct Node {
    op: &'static str,
    inputs: Vec<String>,
    outputs: Vec<String>,
    attributes: Vec<(&'static str, Attribute)>,
}

impl Node {
    /// `NodeProto`: input 1, output 2, name 3, `op_type` 4, attribute 5. A node has the name of its first output.
    fn encode(&self) -> Message {
        let message = self.inputs.iter().fold(Message::default(), |message, input| message.text(1, input));
        let message = self.outputs.iter().fold(message, |message, output| message.text(2, output));
        let message = message.text(3, &self.outputs[0]).text(4, self.op);
        self.attributes.iter().fold(message, |message, (name, value)| message.message(5, &value.encode(name)))
    }
}

/// Name and shape of what goes in or comes out, with a batch of any size in front.
struct Port<'a> {
    name: &'a str,
    rest: &'a [usize],
}

impl Port<'_> {
    /// `ValueInfoProto`: name 1, type 2; `TypeProto`: `tensor_type` 1; its `Tensor`: `elem_type` 1 (FLOAT 1), shape 2; `TensorShapeProto`: dim 1;
    /// its `Dimension`: `dim_value` 1, `dim_param` 2.
    fn encode(&self) -> Message {
        let batch = Message::default().message(1, &Message::default().text(2, "batch"));
        let shape = self
            .rest
            .iter()
            .fold(batch, |shape, &side| shape.message(1, &Message::default().int(1, side.cast_signed() as i64)));
        let tensor = Message::default().int(1, 1).message(2, &shape);
        Message::default().text(1, self.name).message(2, &Message::default().message(1, &tensor))
    }
}

/// Name of what goes in.
const IMAGES: &str = "images";

/// Nodes and constants.
#[derive(Debug, Default)]
pub(super) struct Graph {
    nodes: Vec<Node>,
    /// `TensorProto` of each name.
    constants: BTreeMap<String, Message>,
}

impl Graph {
    /// Returns the images, `[batch, channels, height, width]`.
    pub(super) fn images() -> Value {
        Value(IMAGES.to_owned())
    }

    /// Adds weights.
    ///
    /// # Panics
    /// When there are weights of that name.
    pub(super) fn weights(&mut self, name: &str, shape: &[usize], values: &[f32]) -> Value {
        assert!(!self.constants.contains_key(name), "`{name}` is there already");
        assert_eq!(shape.iter().product::<usize>(), values.len(), "`{name}`");
        let mut bytes = Vec::with_capacity(size_of_val(values));
        for value in values {
            bytes.extend(value.to_le_bytes());
        }
        self.constant(name, shape, 1, &bytes)
    }

    /// Adds a number, or takes it when it is there.
    pub(super) fn number(&mut self, value: f32) -> Value {
        self.constant(&format!("number {value}"), &[], 1, &value.to_le_bytes())
    }

    /// Adds a list of integers (shapes, places), or takes it when it is there.
    pub(super) fn list(&mut self, values: &[i64]) -> Value {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.constant(&format!("list {values:?}"), &[values.len()], 7, &bytes)
    }

    /// Adds an integer, or takes it when it is there.
    pub(super) fn integer(&mut self, value: i64) -> Value {
        self.constant(&format!("integer {value}"), &[], 7, &value.to_le_bytes())
    }

    /// `TensorProto`: dims 1, `data_type` 2 (FLOAT 1, INT64 7), name 8, `raw_data` 9 (little-endian).
    fn constant(&mut self, name: &str, shape: &[usize], data_type: i64, bytes: &[u8]) -> Value {
        if !self.constants.contains_key(name) {
            let shape: Vec<i64> = shape.iter().map(|side| side.cast_signed() as i64).collect();
            let message = Message::default().ints(1, &shape).int(2, data_type).text(8, name).bytes(9, bytes);
            self.constants.insert(name.to_owned(), message);
        }
        Value(name.to_owned())
    }

    /// Adds a node with an output.
    pub(super) fn node(
        &mut self,
        at: &str,
        op: &'static str,
        inputs: &[&Value],
        attributes: &[(&'static str, Attribute)],
    ) -> Value {
        let [output] = self.nodes(at, op, inputs, attributes);
        output
    }

    /// Adds a node with several outputs. `at` is the part of the network that it belongs to.
    pub(super) fn nodes<const N: usize>(
        &mut self,
        at: &str,
        op: &'static str,
        inputs: &[&Value],
        attributes: &[(&'static str, Attribute)],
    ) -> [Value; N] {
        let index = self.nodes.len();
        let outputs: [String; N] = std::array::from_fn(|output| match output {
            0 => format!("{at}/{op}_{index}"),
            _ => format!("{at}/{op}_{index}_{output}"),
        });
        let inputs = inputs.iter().map(|value| value.0.clone()).collect();
        self.nodes.push(Node { op, inputs, outputs: outputs.to_vec(), attributes: attributes.to_vec() });
        outputs.map(Value)
    }

    /// Ends the graph with a value, `[batch, width]`, and encodes it.
    ///
    /// `GraphProto`: node 1, name 2, initializer 5, input 11, output 12.
    pub(super) fn finish(mut self, network: &str, image: [usize; 3], output: (&Value, &str, usize)) -> Message {
        let (value, name, width) = output;
        self.rename(value, name);
        let size: usize = self.constants.values().map(Message::size).sum();
        let mut graph = Message::with_capacity(size + (1 << 20)).text(2, network);
        for node in &self.nodes {
            graph = graph.message(1, &node.encode());
        }
        // each goes when it is written: there are gigabytes of them
        for (_, constant) in std::mem::take(&mut self.constants) {
            graph = graph.message(5, &constant);
        }
        let input = Port { name: IMAGES, rest: &image };
        graph.message(11, &input.encode()).message(12, &Port { name, rest: &[width] }.encode())
    }

    /// Gives the output of a node another name.
    fn rename(&mut self, value: &Value, name: &str) {
        for node in &mut self.nodes {
            for place in node.inputs.iter_mut().chain(&mut node.outputs).filter(|place| **place == value.0) {
                name.clone_into(place);
            }
        }
    }

    /// Says what is wrong with the graph: a name that is given twice, or used before it is there.
    #[cfg(test)]
    pub(super) fn fault(&self) -> Option<String> {
        let mut known: std::collections::BTreeSet<&str> = self.constants.keys().map(String::as_str).collect();
        if !known.insert(IMAGES) {
            return Some("weights are named as the images".to_owned());
        }
        for node in &self.nodes {
            if let Some(input) = node.inputs.iter().find(|input| !known.contains(input.as_str())) {
                return Some(format!("{} uses `{input}`, which is not there yet", node.outputs[0]));
            }
            if let Some(output) = node.outputs.iter().find(|output| !known.insert(output)) {
                return Some(format!("`{output}` is there twice"));
            }
        }
        let used: std::collections::BTreeSet<&String> = self.nodes.iter().flat_map(|node| &node.inputs).collect();
        self.constants.keys().find(|name| !used.contains(name)).map(|name| format!("nothing uses `{name}`"))
    }

    /// Names of the constants.
    #[cfg(test)]
    pub(super) fn constants(&self) -> std::collections::BTreeSet<&str> {
        self.constants.keys().map(String::as_str).collect()
    }

    /// Number of nodes of each kind.
    #[cfg(test)]
    pub(super) fn kinds(&self) -> BTreeMap<&'static str, usize> {
        let mut kinds = BTreeMap::new();
        for node in &self.nodes {
            *kinds.entry(node.op).or_default() += 1;
        }
        kinds
    }
}
