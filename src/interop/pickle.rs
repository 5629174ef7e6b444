//! Reads Python's pickles without executing anything.
//!
//! A pickle is a program for a stack machine (<https://github.com/python/cpython/blob/main/Lib/pickletools.py> describes every instruction),
//! and in Python it may call any function. Here it cannot call one: `GLOBAL` gives a name, and what Python would get by calling it is either
//! a tensor, a dictionary, or a box with a label. A name that [`super::globals`] does not list ends the reading.
//!
//! Objects lie in one vector and refer to each other by index, so that nesting, sharing and cycles cost no stack. Every instruction makes at most
//! one object; strings, objects, stack and depth have limits, and nothing is allocated on the word of the file.

use std::collections::HashMap;
use std::io::{self, BufRead, Read};

use super::dtype::Dtype;
use super::error::Refusal;
use super::globals::{self, Role};
use super::tensor::MAX_RANK;

/// Most objects of a pickle; a checkpoint of a network of 1000 tensors has some 50,000.
const MAX_OBJECTS: usize = 1 << 19;
/// Most values on the stack; Python writes lists and dictionaries in batches of 1000.
const MAX_STACK: usize = 1 << 20;
/// Most values in all lists, tuples and dictionaries together.
const MAX_ELEMENTS: usize = 1 << 23;
/// Most bytes of all strings together.
const MAX_TEXT: usize = 64 << 20;
/// Longest name of a function or class.
const MAX_NAME: usize = 128;

/// A value: small ones as they are, others by their place among the objects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Object(u32),
}

/// An object.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Object {
    Text(String),
    /// Bytes, which nothing needs.
    Bytes,
    /// A number of more than 64 bits, if at most 128.
    Long(Option<i128>),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    /// The name of a function or class, and what it stands for.
    Global(String, Role),
    Storage(StorageId),
    Tensor(Box<TensorId>),
    /// Something else, harmless and unknown: what it contains as a dictionary, and its attributes.
    Box {
        items: Vec<(Value, Value)>,
        state: Value,
    },
}

/// What a pickle says of a storage: where its bytes are is another matter.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StorageId {
    pub(super) key: String,
    /// None: bytes, whose type each tensor tells.
    pub(super) dtype: Option<Dtype>,
    /// Numbers of that type, or bytes.
    pub(super) len: u64,
    /// A part of it with a name of its own: first number and count (files before torch 1.6).
    pub(super) view: Option<(u64, u64)>,
}

/// What a pickle says of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorId {
    pub(super) storage: StorageId,
    pub(super) dtype: Option<Dtype>,
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<usize>,
}

/// What was read: a value, and the objects it refers to.
#[derive(Debug)]
pub(super) struct Pickle {
    pub(super) root: Value,
    pub(super) objects: Vec<Object>,
}

impl Pickle {
    pub(super) fn object(&self, value: Value) -> Option<&Object> {
        match value {
            Value::Object(index) => self.objects.get(index as usize),
            _ => None,
        }
    }

    pub(super) fn text(&self, value: Value) -> Option<&str> {
        match self.object(value)? {
            Object::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// Reads one pickle, up to its end and not a byte further. `remaining` bytes can follow at most.
pub(super) fn read<R: BufRead>(input: R, remaining: u64) -> Result<(Pickle, u64), Refusal> {
    let mut machine = Machine {
        input: Input { stream: input, remaining, used: 0 },
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        objects: Vec::new(),
        elements: 0,
        text: 0,
    };
    let root = machine.run()?;
    Ok((Pickle { root, objects: machine.objects }, machine.input.used))
}

/// A stream that knows how much can follow.
struct Input<R> {
    stream: R,
    remaining: u64,
    used: u64,
}

impl<R: BufRead> Input<R> {
    fn take(&mut self, count: u64) -> Result<(), Refusal> {
        if count > self.remaining {
            let text = format!("a value claims {count} bytes, and {} follow", self.remaining);
            return Err(Refusal::damaged(text));
        }
        self.remaining -= count;
        self.used += count;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Refusal> {
        self.take(N as u64)?;
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn byte(&mut self) -> Result<u8, Refusal> {
        Ok(self.array::<1>()?[0])
    }

    fn bytes(&mut self, count: u64) -> Result<Vec<u8>, Refusal> {
        self.take(count)?;
        let mut bytes = vec![0; count as usize];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn skip(&mut self, count: u64) -> Result<(), Refusal> {
        self.take(count)?;
        let skipped = io::copy(&mut (&mut self.stream).take(count), &mut io::sink())?;
        if skipped < count { Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()) } else { Ok(()) }
    }

    /// A line without its end.
    fn line(&mut self, most: usize) -> Result<String, Refusal> {
        let mut line = Vec::new();
        loop {
            match self.byte()? {
                b'\n' => break,
                _ if line.len() == most => {
                    return Err(Refusal::malformed(format!("its pickle has a line of more than {most} bytes")));
                }
                byte => line.push(byte),
            }
        }
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        String::from_utf8(line).map_err(|_| Refusal::malformed("its pickle has a line that is no text"))
    }
}

struct Machine<R> {
    input: Input<R>,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: HashMap<u32, Value>,
    objects: Vec<Object>,
    elements: usize,
    text: usize,
}

fn odd(what: &str) -> Refusal {
    Refusal::malformed(format!("its pickle is no program that makes sense: {what}"))
}

fn limit(what: &str, most: usize) -> Refusal {
    Refusal::malformed(format!("its pickle has more than {most} {what}"))
}

impl<R: BufRead> Machine<R> {
    #[expect(clippy::too_many_lines, reason = "one line an instruction")]
    fn run(&mut self) -> Result<Value, Refusal> {
        loop {
            match self.input.byte()? {
                b'.' => return self.pop(),
                // protocol and frames
                0x80 => drop(self.input.byte()?),
                0x95 => drop(self.input.array::<8>()?),
                // numbers
                b'N' => self.push(Value::None)?,
                0x88 => self.push(Value::Bool(true))?,
                0x89 => self.push(Value::Bool(false))?,
                b'J' => {
                    let value = i32::from_le_bytes(self.input.array()?);
                    self.push(Value::Int(value.into()))?;
                }
                b'K' => {
                    let value = self.input.byte()?;
                    self.push(Value::Int(value.into()))?;
                }
                b'M' => {
                    let value = u16::from_le_bytes(self.input.array()?);
                    self.push(Value::Int(value.into()))?;
                }
                b'I' => self.line_int()?,
                b'L' => {
                    let line = self.input.line(400)?;
                    let digits = line.strip_suffix('L').unwrap_or(&line);
                    self.long(digits.parse().ok())?;
                }
                0x8a => {
                    let count = self.input.byte()?;
                    self.binary_long(count.into())?;
                }
                0x8b => {
                    let count = i32::from_le_bytes(self.input.array()?);
                    self.binary_long(u64::try_from(count).map_err(|_| odd("a number of negative length"))?)?;
                }
                b'F' => {
                    let line = self.input.line(400)?;
                    let value = line.parse().map_err(|_| odd("a number that is none"))?;
                    self.push(Value::Float(value))?;
                }
                b'G' => {
                    let value = f64::from_be_bytes(self.input.array()?);
                    self.push(Value::Float(value))?;
                }
                // strings; those of Python 2 are bytes
                b'S' => {
                    let line = self.input.line(1 << 16)?;
                    let quoted = line.len() >= 2 && line.starts_with(['\'', '"']);
                    let text = if quoted { line[1..line.len() - 1].to_owned() } else { line };
                    self.text_object(text)?;
                }
                b'V' => {
                    let line = self.input.line(1 << 16)?;
                    self.text_object(line)?;
                }
                b'T' | b'X' => {
                    let count = u32::from_le_bytes(self.input.array()?);
                    self.text(count.into())?;
                }
                b'U' | 0x8c => {
                    let count = self.input.byte()?;
                    self.text(count.into())?;
                }
                0x8d => {
                    let count = u64::from_le_bytes(self.input.array()?);
                    self.text(count)?;
                }
                b'C' => {
                    let count = self.input.byte()?;
                    self.bytes(count.into())?;
                }
                b'B' => {
                    let count = u32::from_le_bytes(self.input.array()?);
                    self.bytes(count.into())?;
                }
                0x8e | 0x96 => {
                    let count = u64::from_le_bytes(self.input.array()?);
                    self.bytes(count)?;
                }
                // the stack and the memo
                b'(' => {
                    if self.marks.len() == MAX_STACK {
                        return Err(limit("marks", MAX_STACK));
                    }
                    self.marks.push(self.stack.len());
                }
                b'0' => drop(self.pop()?),
                b'1' => drop(self.pop_to_mark()?),
                b'2' => {
                    let top = self.top()?;
                    self.push(top)?;
                }
                b'p' => {
                    let place = self.line_place()?;
                    self.put(place)?;
                }
                b'q' => {
                    let place = self.input.byte()?;
                    self.put(place.into())?;
                }
                b'r' => {
                    let place = u32::from_le_bytes(self.input.array()?);
                    self.put(place)?;
                }
                0x94 => {
                    let place = u32::try_from(self.memo.len()).map_err(|_| limit("remembered values", MAX_OBJECTS))?;
                    self.put(place)?;
                }
                b'g' => {
                    let place = self.line_place()?;
                    self.get(place)?;
                }
                b'h' => {
                    let place = self.input.byte()?;
                    self.get(place.into())?;
                }
                b'j' => {
                    let place = u32::from_le_bytes(self.input.array()?);
                    self.get(place)?;
                }
                // containers
                b')' => self.object(Object::Tuple(Vec::new()))?,
                0x85 => self.tuple(1)?,
                0x86 => self.tuple(2)?,
                0x87 => self.tuple(3)?,
                b't' => {
                    let values = self.pop_to_mark()?;
                    self.object(Object::Tuple(values))?;
                }
                b']' | 0x8f => self.object(Object::List(Vec::new()))?,
                b'l' | 0x91 => {
                    let values = self.pop_to_mark()?;
                    self.object(Object::List(values))?;
                }
                b'}' => self.object(Object::Dict(Vec::new()))?,
                b'd' => {
                    let values = self.pop_to_mark()?;
                    self.object(Object::Dict(Vec::new()))?;
                    self.add_pairs(&values)?;
                }
                b'a' => {
                    let value = self.pop()?;
                    self.append(vec![value])?;
                }
                b'e' | 0x90 => {
                    let values = self.pop_to_mark()?;
                    self.append(values)?;
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.add_pairs(&[key, value])?;
                }
                b'u' => {
                    let values = self.pop_to_mark()?;
                    self.add_pairs(&values)?;
                }
                // names, and what Python would make of them
                b'c' => {
                    let module = self.input.line(MAX_NAME)?;
                    let name = self.input.line(MAX_NAME)?;
                    self.global(&module, &name)?;
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    let text = |value| match self.get_object(value) {
                        Some(Object::Text(text)) if text.len() <= MAX_NAME => Ok(text.clone()),
                        _ => Err(odd("a name that is no text")),
                    };
                    let (module, name) = (text(module)?, text(name)?);
                    self.global(&module, &name)?;
                }
                b'i' => {
                    let module = self.input.line(MAX_NAME)?;
                    let name = self.input.line(MAX_NAME)?;
                    let arguments = self.pop_to_mark()?;
                    self.global(&module, &name)?;
                    let class = self.pop()?;
                    self.call(class, &arguments)?;
                }
                b'o' => {
                    let mut values = self.pop_to_mark()?;
                    if values.is_empty() {
                        return Err(odd("an object of no class"));
                    }
                    let class = values.remove(0);
                    self.call(class, &values)?;
                }
                b'R' | 0x81 => {
                    let (arguments, function) = (self.pop()?, self.pop()?);
                    let arguments = self.arguments(arguments)?;
                    self.call(function, &arguments)?;
                }
                0x92 => {
                    let (_keywords, arguments, class) = (self.pop()?, self.pop()?, self.pop()?);
                    let arguments = self.arguments(arguments)?;
                    self.call(class, &arguments)?;
                }
                b'b' => self.build()?,
                b'Q' => {
                    let id = self.pop()?;
                    self.persistent(id)?;
                }
                code => {
                    return Err(odd(&format!("instruction {code:#04x} is unknown, or not one that torch uses")));
                }
            }
        }
    }

    // ---- stack and memo ----------------------------------------------------------------------------------------------

    fn push(&mut self, value: Value) -> Result<(), Refusal> {
        if self.stack.len() == MAX_STACK {
            return Err(limit("values on its stack", MAX_STACK));
        }
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, Refusal> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err(odd("it takes from an empty stack"));
        }
        self.stack.pop().ok_or_else(|| odd("it takes from an empty stack"))
    }

    fn top(&self) -> Result<Value, Refusal> {
        self.stack.last().copied().ok_or_else(|| odd("it looks at an empty stack"))
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Value>, Refusal> {
        let mark = self.marks.pop().ok_or_else(|| odd("a mark is missing"))?;
        if mark > self.stack.len() {
            return Err(odd("a mark is missing"));
        }
        let values = self.stack.split_off(mark);
        self.count(values.len())?;
        Ok(values)
    }

    fn put(&mut self, place: u32) -> Result<(), Refusal> {
        let top = self.top()?;
        if self.memo.len() == MAX_OBJECTS && !self.memo.contains_key(&place) {
            return Err(limit("remembered values", MAX_OBJECTS));
        }
        self.memo.insert(place, top);
        Ok(())
    }

    fn get(&mut self, place: u32) -> Result<(), Refusal> {
        let value = self.memo.get(&place).copied().ok_or_else(|| odd("it recalls what it did not remember"))?;
        self.push(value)
    }

    fn line_place(&mut self) -> Result<u32, Refusal> {
        self.input.line(20)?.parse().map_err(|_| odd("a place that is no number"))
    }

    /// Counts values that go into containers.
    fn count(&mut self, more: usize) -> Result<(), Refusal> {
        self.elements += more;
        if self.elements > MAX_ELEMENTS { Err(limit("values in lists and dictionaries", MAX_ELEMENTS)) } else { Ok(()) }
    }

    fn object(&mut self, object: Object) -> Result<(), Refusal> {
        if self.objects.len() == MAX_OBJECTS {
            return Err(limit("objects", MAX_OBJECTS));
        }
        self.objects.push(object);
        self.push(Value::Object(self.objects.len() as u32 - 1))
    }

    fn get_object(&self, value: Value) -> Option<&Object> {
        match value {
            Value::Object(index) => self.objects.get(index as usize),
            _ => None,
        }
    }

    // ---- values ------------------------------------------------------------------------------------------------------

    fn line_int(&mut self) -> Result<(), Refusal> {
        let line = self.input.line(400)?;
        match line.as_str() {
            "00" => self.push(Value::Bool(false)),
            "01" => self.push(Value::Bool(true)),
            digits => self.long(digits.parse().ok()),
        }
    }

    /// A whole number; none: too large for anything.
    fn long(&mut self, value: Option<i128>) -> Result<(), Refusal> {
        match value.map(i64::try_from) {
            Some(Ok(small)) => self.push(Value::Int(small)),
            _ => self.object(Object::Long(value)),
        }
    }

    /// A whole number in two's complement, lowest byte first.
    fn binary_long(&mut self, count: u64) -> Result<(), Refusal> {
        if count > 16 {
            self.input.skip(count)?;
            return self.long(None);
        }
        let bytes = self.input.bytes(count)?;
        let negative = bytes.last().is_some_and(|&last| last >= 0x80);
        let mut filled = [if negative { 0xff } else { 0 }; 16];
        filled[..bytes.len()].copy_from_slice(&bytes);
        self.long(Some(i128::from_le_bytes(filled)))
    }

    /// A string of so many bytes: UTF-8, or what Python 2 wrote.
    fn text(&mut self, count: u64) -> Result<(), Refusal> {
        if count > MAX_TEXT as u64 {
            return Err(limit("bytes in a string", MAX_TEXT));
        }
        let bytes = self.input.bytes(count)?;
        let text = String::from_utf8(bytes).unwrap_or_else(|e| e.as_bytes().iter().map(|&b| char::from(b)).collect());
        self.text_object(text)
    }

    fn text_object(&mut self, text: String) -> Result<(), Refusal> {
        self.text += text.len();
        if self.text > MAX_TEXT {
            return Err(limit("bytes in its strings", MAX_TEXT));
        }
        self.object(Object::Text(text))
    }

    fn bytes(&mut self, count: u64) -> Result<(), Refusal> {
        self.input.skip(count)?;
        self.object(Object::Bytes)
    }

    fn tuple(&mut self, count: usize) -> Result<(), Refusal> {
        let mut values = vec![Value::None; count];
        for value in values.iter_mut().rev() {
            *value = self.pop()?;
        }
        self.count(count)?;
        self.object(Object::Tuple(values))
    }

    /// Adds values to the list on top.
    fn append(&mut self, mut values: Vec<Value>) -> Result<(), Refusal> {
        self.count(values.len())?;
        let Value::Object(top) = self.top()? else { return Err(odd("it adds to what is no list")) };
        match &mut self.objects[top as usize] {
            Object::List(list) => list.append(&mut values),
            Object::Box { .. } => {}
            _ => return Err(odd("it adds to what is no list")),
        }
        Ok(())
    }

    /// Adds keys and values, alternating, to the dictionary on top.
    fn add_pairs(&mut self, values: &[Value]) -> Result<(), Refusal> {
        self.count(values.len())?;
        let Value::Object(top) = self.top()? else { return Err(odd("it adds to what is no dictionary")) };
        let (pairs, rest) = values.as_chunks::<2>();
        match &mut self.objects[top as usize] {
            Object::Dict(items) | Object::Box { items, .. } if rest.is_empty() => {
                items.extend(pairs.iter().map(|&[key, value]| (key, value)));
                Ok(())
            }
            _ => Err(odd("it adds to what is no dictionary")),
        }
    }

    // ---- names and calls ---------------------------------------------------------------------------------------------

    fn global(&mut self, module: &str, name: &str) -> Result<(), Refusal> {
        let full = format!("{module}.{name}");
        let role = globals::role(&full)?;
        self.object(Object::Global(full, role))
    }

    fn arguments(&mut self, value: Value) -> Result<Vec<Value>, Refusal> {
        let Some(Object::Tuple(values)) = self.get_object(value) else {
            return Err(odd("arguments that are no tuple"));
        };
        let values = values.clone();
        self.count(values.len())?;
        Ok(values)
    }

    /// Pushes what Python would get by calling `function`, without calling anything.
    fn call(&mut self, function: Value, arguments: &[Value]) -> Result<(), Refusal> {
        let Some(Object::Global(name, role)) = self.get_object(function) else {
            return Err(odd("it calls what is no function"));
        };
        match role {
            Role::Tensor { typed } => {
                let wrong = odd(&format!("the arguments of `{name}`"));
                let tensor = self.tensor(arguments, *typed).ok_or(wrong)?;
                self.object(Object::Tensor(Box::new(tensor)))
            }
            Role::Wrapper => {
                // torch._utils._rebuild_from_type_v2(function, type, arguments, state)
                let (Some(&inner), Some(&values)) = (arguments.first(), arguments.get(2)) else {
                    return Err(odd(&format!("the arguments of `{name}`")));
                };
                let values = self.arguments(values)?;
                if matches!(self.get_object(inner), Some(Object::Global(_, Role::Wrapper))) {
                    return Err(odd("a tensor within a tensor"));
                }
                self.call(inner, &values)
            }
            Role::First => self.push(arguments.first().copied().unwrap_or(Value::None)),
            Role::Dict => {
                let mut items = Vec::new();
                if let Some(Object::List(pairs) | Object::Tuple(pairs)) =
                    arguments.first().and_then(|&list| self.get_object(list))
                {
                    for &pair in pairs {
                        if let Some(Object::List(pair) | Object::Tuple(pair)) = self.get_object(pair)
                            && let [key, value] = pair[..]
                        {
                            items.push((key, value));
                        }
                    }
                } else if let Some(Object::Dict(given)) = arguments.first().and_then(|&dict| self.get_object(dict)) {
                    items.clone_from(given);
                }
                self.count(2 * items.len())?;
                self.object(Object::Dict(items))
            }
            Role::Box | Role::Storage(_) | Role::Dtype(_) => {
                self.object(Object::Box { items: Vec::new(), state: Value::None })
            }
        }
    }

    /// `(storage, offset, size, stride, ..)`, and a type where storages are bytes.
    fn tensor(&self, arguments: &[Value], typed: bool) -> Option<TensorId> {
        let sizes = |value: Value| -> Option<Vec<usize>> {
            let (Object::Tuple(values) | Object::List(values)) = self.get_object(value)? else { return None };
            if values.len() > MAX_RANK {
                return None;
            }
            let size = |value: &Value| match value {
                Value::Int(size) => usize::try_from(*size).ok(),
                _ => None,
            };
            values.iter().map(size).collect()
        };
        let &[storage, Value::Int(offset), shape, strides, ..] = arguments else { return None };
        let Object::Storage(storage) = self.get_object(storage)? else { return None };
        let dtype = if typed {
            let Object::Global(_, Role::Dtype(dtype)) = self.get_object(*arguments.get(6)?)? else { return None };
            *dtype
        } else {
            storage.dtype
        };
        Some(TensorId {
            storage: storage.clone(),
            dtype,
            offset: usize::try_from(offset).ok()?,
            shape: sizes(shape)?,
            strides: sizes(strides)?,
        })
    }

    /// Sets attributes of the object below the top.
    fn build(&mut self) -> Result<(), Refusal> {
        let given = self.pop()?;
        let Value::Object(object) = self.top()? else { return Ok(()) };
        if let Object::Box { state, .. } = &mut self.objects[object as usize] {
            *state = given;
        }
        Ok(())
    }

    /// Torch's way to say which storage is meant: `("storage", type, key, device, length[, view])`.
    fn persistent(&mut self, id: Value) -> Result<(), Refusal> {
        let wrong = || odd("a storage that is described wrongly");
        let Some(Object::Tuple(parts)) = self.get_object(id) else { return Err(wrong()) };
        let text = |value: Value| match (value, self.get_object(value)) {
            (_, Some(Object::Text(text))) if text.len() <= MAX_NAME => Some(text.clone()),
            (Value::Int(number), _) => Some(number.to_string()),
            _ => None,
        };
        match parts.first().and_then(|&kind| text(kind)).as_deref() {
            Some("storage") => {}
            Some("module") => return Err(globals::whole_module("a module with its source code")),
            _ => return Err(wrong()),
        }
        let &[_, kind, key, _device, Value::Int(len), ..] = &parts[..] else { return Err(wrong()) };
        let Some(Object::Global(name, role)) = self.get_object(kind) else { return Err(wrong()) };
        let Role::Storage(dtype) = *role else {
            return Err(odd(&format!("`{name}` as the type of a storage")));
        };
        let view = match parts.get(5) {
            None | Some(Value::None) => None,
            Some(&view) => match self.get_object(view) {
                Some(Object::Tuple(view)) => match view[..] {
                    [_key, Value::Int(from), Value::Int(count)] => {
                        let place = |number| u64::try_from(number).map_err(|_| wrong());
                        Some((place(from)?, place(count)?))
                    }
                    _ => return Err(wrong()),
                },
                _ => return Err(wrong()),
            },
        };
        let key = text(key).ok_or_else(wrong)?;
        let len = u64::try_from(len).map_err(|_| wrong())?;
        self.object(Object::Storage(StorageId { key, dtype, len, view }))
    }
}
