//! Names that pickles of weights may mention, and what they stand for.
//!
//! Nothing is ever called; the list says what is understood or known to be harmless, so that a file that mentions something else (`os.system`)
//! is refused by name instead of read in part.

use super::dtype::Dtype;
use super::error::Refusal;

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Role {
    /// Makes a tensor of `(storage, offset, size, stride, ..)`; `typed`: its type is the seventh argument.
    Tensor { typed: bool },
    /// Calls the function that is its first argument with the tuple that is its third: subclasses of tensors.
    Wrapper,
    /// Stands for its first argument: parameters, sizes.
    First,
    /// Makes a dictionary.
    Dict,
    /// The type of a storage; none: bytes.
    Storage(Option<Dtype>),
    /// A type of numbers; none: one that is not read.
    Dtype(Option<Dtype>),
    /// Makes something that is kept closed.
    Box,
}

const KNOWN: &[(&str, Role)] = &[
    ("torch._utils._rebuild_tensor", Role::Tensor { typed: false }),
    ("torch._utils._rebuild_tensor_v2", Role::Tensor { typed: false }),
    ("torch._utils._rebuild_tensor_v3", Role::Tensor { typed: true }),
    ("torch._tensor._rebuild_from_type_v2", Role::Wrapper),
    ("torch._utils._rebuild_parameter", Role::First),
    ("torch._utils._rebuild_parameter_with_state", Role::First),
    ("torch.nn.parameter.Parameter", Role::First),
    ("torch.nn.parameter.Buffer", Role::First),
    ("torch.Size", Role::First),
    ("collections.OrderedDict", Role::Dict),
    ("builtins.dict", Role::Dict),
    ("__builtin__.dict", Role::Dict),
    ("torch.DoubleStorage", Role::Storage(Some(Dtype::F64))),
    ("torch.FloatStorage", Role::Storage(Some(Dtype::F32))),
    ("torch.HalfStorage", Role::Storage(Some(Dtype::F16))),
    ("torch.BFloat16Storage", Role::Storage(Some(Dtype::Bf16))),
    ("torch.LongStorage", Role::Storage(Some(Dtype::I64))),
    ("torch.IntStorage", Role::Storage(Some(Dtype::I32))),
    ("torch.ShortStorage", Role::Storage(Some(Dtype::I16))),
    ("torch.CharStorage", Role::Storage(Some(Dtype::I8))),
    ("torch.ByteStorage", Role::Storage(Some(Dtype::U8))),
    ("torch.BoolStorage", Role::Storage(Some(Dtype::Bool))),
    ("torch.UntypedStorage", Role::Storage(None)),
    ("torch.storage.UntypedStorage", Role::Storage(None)),
    ("torch.storage._UntypedStorage", Role::Storage(None)),
    ("torch.float64", Role::Dtype(Some(Dtype::F64))),
    ("torch.float32", Role::Dtype(Some(Dtype::F32))),
    ("torch.float16", Role::Dtype(Some(Dtype::F16))),
    ("torch.bfloat16", Role::Dtype(Some(Dtype::Bf16))),
    ("torch.int64", Role::Dtype(Some(Dtype::I64))),
    ("torch.int32", Role::Dtype(Some(Dtype::I32))),
    ("torch.int16", Role::Dtype(Some(Dtype::I16))),
    ("torch.int8", Role::Dtype(Some(Dtype::I8))),
    ("torch.uint64", Role::Dtype(Some(Dtype::U64))),
    ("torch.uint32", Role::Dtype(Some(Dtype::U32))),
    ("torch.uint16", Role::Dtype(Some(Dtype::U16))),
    ("torch.uint8", Role::Dtype(Some(Dtype::U8))),
    ("torch.bool", Role::Dtype(Some(Dtype::Bool))),
    ("torch.float8_e4m3fn", Role::Dtype(Some(Dtype::F8E4M3))),
    ("torch.float8_e5m2", Role::Dtype(Some(Dtype::F8E5M2))),
    ("torch.complex64", Role::Dtype(None)),
    ("torch.complex128", Role::Dtype(None)),
];

/// Harmless, and kept closed: settings, states of optimizers and schedules, paths, numbers of other libraries.
const CLOSED: &[&str] = &[
    "_codecs.encode",
    "addict.addict.Dict",
    "argparse.Namespace",
    "collections.Counter",
    "collections.defaultdict",
    "collections.deque",
    "copy_reg.__newobj__",
    "copy_reg._reconstructor",
    "copyreg.__newobj__",
    "copyreg._reconstructor",
    "datetime.date",
    "datetime.datetime",
    "datetime.timedelta",
    "datetime.timezone",
    "decimal.Decimal",
    "easydict.EasyDict",
    "fractions.Fraction",
    "fvcore.common.config.CfgNode",
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "mmcv.utils.config.ConfigDict",
    "mmengine.config.config.ConfigDict",
    "mmengine.logging.history_buffer.HistoryBuffer",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy._core.numeric._frombuffer",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.core.numeric._frombuffer",
    "numpy.dtype",
    "numpy.ndarray",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath",
    "pathlib.WindowsPath",
    "pathlib._local.Path",
    "pathlib._local.PosixPath",
    "pytorch_lightning.utilities.parsing.AttributeDict",
    "torch.Tensor",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_sparse_tensor",
    "torch.device",
    "torch.serialization._get_layout",
    "torch.storage._load_from_bytes",
    "types.SimpleNamespace",
    "typing.Any",
    "uuid.UUID",
    "yacs.config.CfgNode",
];

/// The same of everything below a module.
const CLOSED_BELOW: &[&str] = &[
    "lightning.pytorch.callbacks.",
    "numpy.dtypes.",
    "numpy.random._pickle.",
    "omegaconf.",
    "pytorch_lightning.callbacks.",
    "torch.amp.grad_scaler.",
    "torch.cuda.amp.grad_scaler.",
    "torch.optim.",
];

/// Types of Python itself.
const BUILTINS: &[&str] = &[
    "bool",
    "bytearray",
    "bytes",
    "complex",
    "float",
    "frozenset",
    "int",
    "list",
    "long",
    "object",
    "range",
    "set",
    "slice",
    "str",
    "tuple",
    "unicode",
    "xrange",
];

/// Modules whose objects are networks, not weights.
const NETWORKS: &[&str] = &["lightly.models.", "timm.", "torch.nn.", "torchvision.models.", "transformers."];

/// Returns what a name stands for.
pub(super) fn role(name: &str) -> Result<Role, Refusal> {
    // storages of CUDA tensors are named after their device in old files
    let name = name
        .strip_prefix("torch.cuda.")
        .filter(|rest| rest.ends_with("Storage"))
        .map_or(name.to_owned(), |rest| format!("torch.{rest}"));
    let name = name.as_str();
    if let Some((_, role)) = KNOWN.iter().find(|(known, _)| *known == name) {
        return Ok(*role);
    }
    let builtin = name.strip_prefix("builtins.").or_else(|| name.strip_prefix("__builtin__."));
    if builtin.is_some_and(|builtin| BUILTINS.contains(&builtin))
        || CLOSED.contains(&name)
        || CLOSED_BELOW.iter().any(|module| name.starts_with(module))
    {
        return Ok(Role::Box);
    }
    if NETWORKS.iter().any(|module| name.starts_with(module)) {
        return Err(whole_module(&format!("a pickled object of the class `{name}`")));
    }
    if name.starts_with("torch.") && name.ends_with("Storage") {
        return Err(Refusal::new(
            format!("it has numbers of the type `{name}`, which is not read"),
            "save the weights as float32, float16 or bfloat16",
        ));
    }
    Err(Refusal::new(
        format!("its pickle mentions `{name}`, which is not among the harmless names of weights; nothing was executed"),
        "if you trust the file, load it in Python and save its state dict alone, best with safetensors' `save_file`",
    ))
}

/// A file of a network instead of its weights.
pub(super) fn whole_module(what: &str) -> Refusal {
    Refusal::new(
        format!("it holds {what}, not a state dict"),
        "in Python, load it and save the weights alone: `torch.save(model.state_dict(), \"weights.pth\")`",
    )
}
