//! Small files as other programs write them, and as they should not.
#![expect(clippy::cast_possible_wrap, reason = "they are small")]

use std::collections::BTreeMap;
use std::io::{Cursor, Write as _};

use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// A pickle under construction.
#[derive(Clone)]
pub(super) struct Pickler(pub(super) Vec<u8>);

impl Pickler {
    pub(super) fn new() -> Self {
        Self(vec![0x80, 2])
    }

    pub(super) fn op(mut self, code: u8) -> Self {
        self.0.push(code);
        self
    }

    pub(super) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    pub(super) fn global(self, module: &str, name: &str) -> Self {
        self.raw(format!("c{module}\n{name}\n").as_bytes())
    }

    pub(super) fn text(self, text: &str) -> Self {
        self.op(b'X').raw(&(text.len() as u32).to_le_bytes()).raw(text.as_bytes())
    }

    pub(super) fn int(self, value: i64) -> Self {
        self.raw(&[0x8a, 8]).raw(&value.to_le_bytes())
    }

    pub(super) fn ints(self, values: &[i64]) -> Self {
        values.iter().fold(self.op(b'('), |pickler, &value| pickler.int(value)).op(b't')
    }

    /// A storage of so many numbers.
    pub(super) fn storage(self, kind: &str, key: &str, len: i64) -> Self {
        self.op(b'(').text("storage").global("torch", kind).text(key).text("cpu").int(len).op(b't').op(b'Q')
    }

    /// A tensor of single precision.
    pub(super) fn tensor(self, key: &str, len: i64, offset: i64, shape: &[i64], strides: &[i64]) -> Self {
        let start = self.global("torch._utils", "_rebuild_tensor_v2").op(b'(').storage("FloatStorage", key, len);
        let sized = start.int(offset).ints(shape).ints(strides).op(0x89);
        sized.global("collections", "OrderedDict").raw(b")R").op(b't').op(b'R')
    }

    /// The dictionary of one tensor.
    pub(super) fn one(len: i64, offset: i64, shape: &[i64], strides: &[i64]) -> Vec<u8> {
        Self::new().op(b'}').text("a").tensor("0", len, offset, shape, strides).op(b's').end()
    }

    pub(super) fn end(self) -> Vec<u8> {
        self.op(b'.').0
    }
}

/// An archive of torch.
pub(super) fn archive(pickle: &[u8], storages: &[(&str, &[u8])]) -> Vec<u8> {
    let mut members = vec![("data.pkl".to_owned(), pickle)];
    members.extend(storages.iter().map(|(key, bytes)| (format!("data/{key}"), *bytes)));
    members.push(("version".to_owned(), b"3\n"));
    members_of("archive", &members)
}

pub(super) fn members_of(root: &str, members: &[(String, &[u8])]) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for (name, bytes) in members {
        writer.start_file(format!("{root}/{name}"), options).unwrap();
        writer.write_all(bytes).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

/// A file of torch before 1.6.
pub(super) fn legacy(pickle: &[u8], storages: &[(&str, u64, &[u8])]) -> Vec<u8> {
    let magic = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
    let mut file = Pickler::new().raw(&[0x8a, 10]).raw(&magic).end();
    file.extend(Pickler::new().int(1001).end());
    file.extend(Pickler::new().op(b'}').text("little_endian").op(0x88).op(b's').end());
    file.extend(pickle);
    let keys = storages.iter().fold(Pickler::new().raw(b"]("), |keys, (key, ..)| keys.text(key));
    file.extend(keys.op(b'e').end());
    for (_, count, bytes) in storages {
        file.extend(count.to_le_bytes());
        file.extend(*bytes);
    }
    file
}

/// A safetensors file with this header.
pub(super) fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// Values of a tensor that are all different.
pub(super) fn values(shape: &[usize], seed: usize) -> Vec<f32> {
    (0..shape.iter().product()).map(|i: usize| ((i + seed) as f32 * 0.37).sin().abs()).collect()
}

pub(super) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Tensors as a safetensors file.
pub(super) fn safetensors(tensors: &BTreeMap<String, Vec<usize>>) -> Vec<u8> {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (seed, (name, shape)) in tensors.iter().enumerate() {
        let from = data.len();
        data.extend(bytes_of(&values(shape, seed)));
        header.push(format!(
            "{name:?}:{{\"dtype\":\"F32\",\"shape\":{shape:?},\"data_offsets\":[{from},{}]}}",
            data.len()
        ));
    }
    with_header(&format!("{{{}}}", header.join(",")), &data)
}

/// Tensors as a training checkpoint: `{"epoch": 3, "args": Namespace(arch="vit"), "teacher": OrderedDict(..)}`.
pub(super) fn training(tensors: &BTreeMap<String, Vec<usize>>) -> (Vec<u8>, Vec<(String, Vec<u8>)>) {
    let arguments = Pickler::new()
        .op(b'}')
        .text("epoch")
        .int(3)
        .op(b's')
        .text("args")
        .global("argparse", "Namespace")
        .raw(b")\x81}");
    let arguments = arguments.text("arch").text("vit").op(b's').op(b'b').op(b's');
    let mut pickle = arguments.text("teacher").global("collections", "OrderedDict").raw(b")R(");
    let mut storages = Vec::new();
    for (seed, (name, shape)) in tensors.iter().enumerate() {
        let values = values(shape, seed);
        let sides: Vec<i64> = shape.iter().map(|&side| side as i64).collect();
        let mut strides = vec![1; sides.len()];
        for axis in (1..sides.len()).rev() {
            strides[axis - 1] = strides[axis] * sides[axis];
        }
        pickle = pickle.text(name).tensor(&seed.to_string(), values.len() as i64, 0, &sides, &strides);
        storages.push((seed.to_string(), bytes_of(&values)));
    }
    (pickle.op(b'u').op(b's').end(), storages)
}
