//! Types of numbers in files.

use burn::tensor::{bf16, f16};

/// Type of the numbers of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are what they are called")]
pub enum Dtype {
    F64,
    F32,
    F16,
    Bf16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
    /// Eight bits with 4 of exponent; seen, not converted.
    F8E4M3,
    /// Eight bits with 5 of exponent; seen, not converted.
    F8E5M2,
}

impl Dtype {
    /// Returns the bytes of one number.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::I8 | Self::U8 | Self::Bool | Self::F8E4M3 | Self::F8E5M2 => 1,
        }
    }

    /// Returns torch's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F64 => "float64",
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::I64 => "int64",
            Self::I32 => "int32",
            Self::I16 => "int16",
            Self::I8 => "int8",
            Self::U64 => "uint64",
            Self::U32 => "uint32",
            Self::U16 => "uint16",
            Self::U8 => "uint8",
            Self::Bool => "bool",
            Self::F8E4M3 => "float8_e4m3",
            Self::F8E5M2 => "float8_e5m2",
        }
    }

    /// Tells whether weights can be of this type.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Reads the name that safetensors has for it.
    pub(super) fn of_safetensors(name: &str) -> Option<Self> {
        Some(match name {
            "F64" => Self::F64,
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            "I64" => Self::I64,
            "I32" => Self::I32,
            "I16" => Self::I16,
            "I8" => Self::I8,
            "U64" => Self::U64,
            "U32" => Self::U32,
            "U16" => Self::U16,
            "U8" => Self::U8,
            "BOOL" => Self::Bool,
            "F8_E4M3" => Self::F8E4M3,
            "F8_E5M2" => Self::F8E5M2,
            _ => return None,
        })
    }

    /// Decodes numbers that lie one behind the other, lowest byte first unless `big_endian`. None: a type that is not converted.
    pub(super) fn decode(self, bytes: &[u8], big_endian: bool) -> Option<Vec<f64>> {
        self.map(bytes, big_endian, |value| value)
    }

    /// As [`decode`](Self::decode), rounded to single precision.
    pub(super) fn decode_f32(self, bytes: &[u8], big_endian: bool) -> Option<Vec<f32>> {
        if self == Self::F32 && !big_endian {
            return Some(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect());
        }
        self.map(bytes, big_endian, |value| value as f32)
    }

    fn map<T>(self, bytes: &[u8], big_endian: bool, to: impl Fn(f64) -> T) -> Option<Vec<T>> {
        fn each<const N: usize, T>(bytes: &[u8], big_endian: bool, read: impl Fn([u8; N]) -> T) -> Vec<T> {
            let (chunks, _) = bytes.as_chunks::<N>();
            let turned = |chunk: &[u8; N]| {
                let mut chunk = *chunk;
                if big_endian {
                    chunk.reverse();
                }
                chunk
            };
            chunks.iter().map(|chunk| read(turned(chunk))).collect()
        }
        Some(match self {
            Self::F64 => each(bytes, big_endian, |b| to(f64::from_le_bytes(b))),
            Self::F32 => each(bytes, big_endian, |b| to(f64::from(f32::from_le_bytes(b)))),
            Self::F16 => each(bytes, big_endian, |b| to(f16::from_le_bytes(b).to_f64())),
            Self::Bf16 => each(bytes, big_endian, |b| to(bf16::from_le_bytes(b).to_f64())),
            Self::I64 => each(bytes, big_endian, |b| to(i64::from_le_bytes(b) as f64)),
            Self::I32 => each(bytes, big_endian, |b| to(f64::from(i32::from_le_bytes(b)))),
            Self::I16 => each(bytes, big_endian, |b| to(f64::from(i16::from_le_bytes(b)))),
            Self::I8 => each(bytes, big_endian, |b| to(f64::from(i8::from_le_bytes(b)))),
            Self::U64 => each(bytes, big_endian, |b| to(u64::from_le_bytes(b) as f64)),
            Self::U32 => each(bytes, big_endian, |b| to(f64::from(u32::from_le_bytes(b)))),
            Self::U16 => each(bytes, big_endian, |b| to(f64::from(u16::from_le_bytes(b)))),
            Self::U8 => each(bytes, big_endian, |b: [u8; 1]| to(f64::from(b[0]))),
            Self::Bool => each(bytes, big_endian, |b: [u8; 1]| to(f64::from(u8::from(b[0] != 0)))),
            Self::F8E4M3 | Self::F8E5M2 => return None,
        })
    }
}
