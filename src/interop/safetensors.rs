//! The header of a safetensors file (<https://github.com/huggingface/safetensors#format>): eight bytes of length, JSON, then the numbers.
//!
//! Only the header is read here; the safetensors crate wants the whole file in memory and takes the last of two tensors of one name.

use std::fmt;
use std::fs::File;
use std::io::{Read, Seek};

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::dtype::Dtype;
use super::error::Refusal;
use super::tensor::{MAX_RANK, Storage, Tensor};

/// Longest header: 200 times that of a network of 1000 tensors.
const MAX_HEADER: u64 = 32 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// Names in the order of the file, each once.
struct Header(Vec<(String, Info)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut found = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        let info = map.next_value()?;
                        found.push((name, info));
                    }
                }
                Ok(Header(found))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

/// Reads where the tensors of a file lie.
pub(super) fn read(mut file: &File, number: usize) -> Result<Vec<(String, Tensor)>, Refusal> {
    let length = file.metadata()?.len();
    file.rewind()?;
    let mut start = [0; 8];
    file.read_exact(&mut start)?;
    let header = u64::from_le_bytes(start);
    let rest = length - 8;
    if header > rest {
        return Err(Refusal::damaged(format!("its header claims {header} bytes, and {rest} follow")));
    }
    if header > MAX_HEADER {
        return Err(Refusal::malformed(format!("its header claims {header} bytes, at most {MAX_HEADER} are read")));
    }
    let mut text = vec![0; header as usize];
    file.read_exact(&mut text)?;
    let Header(infos) = serde_json::from_slice(&text)
        .map_err(|error| Refusal::damaged(format!("its header is no table of tensors: {error}")))?;
    let data = rest - header;
    let mut spans: Vec<(u64, u64, &str)> = Vec::with_capacity(infos.len());
    for (name, info) in &infos {
        let [from, to] = info.data_offsets;
        if from > to || to > data {
            return Err(Refusal::damaged(format!(
                "{name:?} claims bytes {from} to {to} of its data, and there are {data}"
            )));
        }
        spans.push((from, to, name));
    }
    spans.sort_unstable();
    if let Some(pair) = spans.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        return Err(Refusal::malformed(format!("{:?} and {:?} claim the same bytes", pair[0].2, pair[1].2)));
    }
    let mut tensors = Vec::with_capacity(infos.len());
    for (name, info) in infos {
        let [from, to] = info.data_offsets;
        let Some(dtype) = Dtype::of_safetensors(&info.dtype) else {
            return Err(Refusal::new(
                format!("{name:?} is of type {:?}, which is not read", info.dtype),
                "save the weights as float32, float16 or bfloat16",
            ));
        };
        if info.shape.len() > MAX_RANK {
            return Err(Refusal::malformed(format!("{name:?} has {} dimensions", info.shape.len())));
        }
        let storage = Storage { file: number, start: 8 + header + from, bytes: to - from, big_endian: false };
        let tensor = Tensor::contiguous(dtype, info.shape, storage);
        let claimed = tensor.num_elements().and_then(|count| count.checked_mul(dtype.size()));
        if claimed.is_none_or(|claimed| claimed as u64 != to - from) {
            return Err(Refusal::damaged(format!(
                "{name:?} is {} {:?}, and has {} bytes",
                dtype.name(),
                tensor.shape,
                to - from
            )));
        }
        tensors.push((name, tensor));
    }
    Ok(tensors)
}
