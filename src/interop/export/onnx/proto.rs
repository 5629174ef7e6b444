//! Protocol Buffers, as far as a writer of ONNX needs them.
//!
//! <https://protobuf.dev/programming-guides/encoding/>: a message is a row of fields, each a key (number and wire type) and a value.

/// Numbers of whatever length: integers and enumerations.
const VARINT: u64 = 0;
/// A length and so many bytes: text, bytes, messages.
const LENGTH: u64 = 2;
/// Four bytes: `float`.
const FIXED: u64 = 5;

/// A message while it is written, field by field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Message(Vec<u8>);

impl Message {
    /// An empty message with room for so many bytes.
    pub(super) fn with_capacity(bytes: usize) -> Self {
        Self(Vec::with_capacity(bytes))
    }

    /// Returns the number of bytes so far.
    pub(super) fn size(&self) -> usize {
        self.0.len()
    }

    /// Adds an `int64`, an `int32` or an enumeration.
    pub(super) fn int(mut self, field: u64, value: i64) -> Self {
        self.key(field, VARINT);
        // a negative number is its two's complement of 64 bits
        self.varint(value.cast_unsigned());
        self
    }

    /// Adds each of several `int64`, which proto2 (onnx.proto) does not pack.
    pub(super) fn ints(self, field: u64, values: &[i64]) -> Self {
        values.iter().fold(self, |message, &value| message.int(field, value))
    }

    /// Adds a `float`.
    pub(super) fn float(mut self, field: u64, value: f32) -> Self {
        self.key(field, FIXED);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Adds a `string`.
    pub(super) fn text(self, field: u64, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    /// Adds `bytes`.
    pub(super) fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.key(field, LENGTH);
        self.varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    /// Adds a message.
    pub(super) fn message(self, field: u64, value: &Self) -> Self {
        self.bytes(field, &value.0)
    }

    /// Returns what was written.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn key(&mut self, field: u64, wire: u64) {
        self.varint(field << 3 | wire);
    }

    /// Seven bits a byte, the lowest first; all but the last have the highest bit set.
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_documentation() {
        // "Test1 { a = 150 }", "Test2 { b = testing }" and "Test3 { c { a = 150 } }" of the page
        let first = Message::default().int(1, 150);
        assert_eq!(first.0, [0x08, 0x96, 0x01]);
        assert_eq!(Message::default().text(2, "testing").0, b"\x12\x07testing");
        assert_eq!(Message::default().message(3, &first).0, [0x1a, 0x03, 0x08, 0x96, 0x01]);
        let minus_two = [8, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        assert_eq!(Message::default().int(1, -2).0, minus_two);
    }

    #[test]
    fn every_length_of_a_number() {
        for (value, bytes) in [
            (0, &[0][..]),
            (127, &[0x7f]),
            (128, &[0x80, 0x01]),
            (16_383, &[0xff, 0x7f]),
            (16_384, &[0x80, 0x80, 0x01]),
            (i64::MAX, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]),
        ] {
            assert_eq!(Message::default().int(1, value).0[1..], *bytes, "{value}");
        }
        // from field 16 on the key has two bytes
        assert_eq!(Message::default().int(20, 7).0, [0xa0, 0x01, 0x07]);
        assert_eq!(Message::default().float(2, 1.0).0, [0x15, 0, 0, 0x80, 0x3f]);
        assert_eq!(Message::default().ints(8, &[1, -1]).0.len(), 2 + 11);
        assert!(Message::default().ints(8, &[]).into_bytes().is_empty());
    }
}
