//! Files that are well made, wrongly made, and made to do harm.

mod fuzz;
mod write;

use std::path::PathBuf;

use super::*;
use crate::model::{Backbone, BackboneConfig, Scope, params};
use write::{Pickler, archive, legacy, members_of, safetensors, with_header};

/// A file in a folder of its own.
fn on_disk(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

/// Opens, looks for a backbone and reads everything.
fn use_up(path: &std::path::Path) -> Result<usize, ImportError> {
    let checkpoint = Checkpoint::open(path)?;
    let mut count = 0;
    for name in checkpoint.tensors().keys() {
        count += checkpoint.read(name)?.len();
    }
    let found = Found::find(&checkpoint, &Hints::default())?;
    assert!(!found.layout().is_empty());
    let fit = found.fit(found.arch());
    assert!(fit.nearest().len() <= fit.rows.len());
    let _ = found.arch().config();
    count += found.load(found.arch())?.len();
    Ok(count)
}

fn tiny_vit() -> Arch {
    let config = "[vit]\npatch = 2\ndim = 8\ndepth = 1\nheads = 2\nmlp_ratio = 2";
    Arch::from_config(&toml::from_str(config).unwrap(), 4).unwrap()
}

const ONE: &[u8] = &[0, 0, 128, 63];

#[expect(clippy::too_many_lines, reason = "a table")]
fn harmful() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let header = |text: &str| with_header(text, &[0; 16]);
    let zip = |pickle: Vec<u8>| archive(&pickle, &[("0", ONE)]);
    let call = |module: &str, name: &str| {
        zip(Pickler::new().global(module, name).op(b'(').text("touch harm").op(b't').op(b'R').end())
    };
    let patched = |file: Vec<u8>, from: &[u8], to: &[u8]| {
        let mut file = file;
        for at in 0..file.len() - from.len() {
            if file[at..].starts_with(from) {
                file[at..at + to.len()].copy_from_slice(to);
            }
        }
        file
    };
    let two = archive(&Pickler::one(1, 0, &[1], &[1]), &[("0", ONE), ("1", ONE)]);
    let nested = |depth: usize| {
        let start = Pickler::new().raw(&vec![b']'; depth]);
        zip(start.raw(&vec![b'a'; depth - 1]).end())
    };
    let laughs = {
        // a list of ten of the list before, forty times
        let mut pickle = Pickler::new().op(b']').raw(b"q\x00");
        for level in 1..41u8 {
            pickle = pickle.raw(b"](").raw(&[b'h', level - 1].repeat(10)).raw(&[b'e', b'q', level]);
        }
        zip(pickle.end())
    };
    let truncated = |file: Vec<u8>, less: usize| file[..file.len() - less].to_vec();
    let safe = safetensors(&tiny_vit().tensors());
    vec![
        ("empty", Vec::new(), "it is empty"),
        ("lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:0".to_vec(), "pointer of git-lfs"),
        ("page", b"<!DOCTYPE html><html>404</html>".to_vec(), "web page"),
        ("gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\0".to_vec(), "compressed with gzip"),
        ("hdf5", b"\x89HDF\r\n\x1a\n".to_vec(), "HDF5"),
        ("noise", (0..64u8).map(|i| i.wrapping_mul(37) ^ 0x5a).collect(), "neither a safetensors file"),
        // safetensors
        (
            "long header",
            [&u64::MAX.to_le_bytes()[..], b"{}"].concat(),
            "header claims 18446744073709551615 bytes, and 2 follow",
        ),
        ("no JSON", with_header("{\"a\": ", &[]), "no table of tensors"),
        ("deep JSON", with_header(&format!("{{\"__metadata__\":{}", "[".repeat(5000)), &[]), "no table of tensors"),
        (
            "twice",
            header(
                "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
            ),
            "two tensors are called \"a\"",
        ),
        (
            "outside",
            header("{\"a\":{\"dtype\":\"U8\",\"shape\":[17],\"data_offsets\":[0,17]}}"),
            "claims bytes 0 to 17 of its data, and there are 16",
        ),
        (
            "far outside",
            header(
                "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[18446744073709551614,18446744073709551615]}}",
            ),
            "of its data, and there are 16",
        ),
        ("backwards", header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[3,2]}}"), "claims bytes 3 to 2"),
        (
            "overlap",
            header(
                "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
            ),
            "claim the same bytes",
        ),
        (
            "overflow",
            header("{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}"),
            "and has 0 bytes",
        ),
        (
            "negative",
            header("{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}"),
            "no table of tensors",
        ),
        ("size", header("{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,16]}}"), "and has 16 bytes"),
        ("type", header("{\"a\":{\"dtype\":\"F4\",\"shape\":[16],\"data_offsets\":[0,16]}}"), "of type \"F4\""),
        (
            "sides",
            header(&format!("{{\"a\":{{\"dtype\":\"U8\",\"shape\":{:?},\"data_offsets\":[0,1]}}}}", [1; 40])),
            "40 dimensions",
        ),
        ("cut", truncated(safe, 5), "of its data, and there are"),
        // calls
        ("os.system", call("os", "system"), "mentions `os.system`"),
        ("posix.system", call("posix", "system"), "mentions `posix.system`"),
        ("eval", call("builtins", "eval"), "mentions `builtins.eval`"),
        ("old eval", call("__builtin__", "eval"), "mentions `__builtin__.eval`"),
        ("getattr", call("builtins", "getattr"), "mentions `builtins.getattr`"),
        ("torch.load", call("torch.serialization", "load"), "mentions `torch.serialization.load`"),
        ("run", call("numpy.testing._private.utils", "runstring"), "mentions `numpy.testing"),
        ("stack", zip(Pickler::new().text("subprocess").text("Popen").op(0x93).end()), "mentions `subprocess.Popen`"),
        ("inst", zip(Pickler::new().op(b'(').text("x").raw(b"ios\nsystem\n").end()), "mentions `os.system`"),
        ("main", zip(Pickler::new().global("__main__", "Harm").raw(b")\x81").end()), "mentions `__main__.Harm`"),
        ("module", zip(Pickler::new().global("torch.nn.modules.linear", "Linear").end()), "not a state dict"),
        ("opcode", zip(Pickler::new().op(0x82).op(1).end()), "instruction 0x82"),
        ("call a tuple", zip(Pickler::new().raw(b"))R").end()), "calls what is no function"),
        ("later call", legacy(&Pickler::new().global("os", "system").end(), &[]), "mentions `os.system`"),
        // machines that go wrong
        ("empty stack", zip(Pickler::new().op(b'0').end()), "empty stack"),
        ("no mark", zip(Pickler::new().op(b't').end()), "a mark is missing"),
        ("below the mark", zip(Pickler::new().raw(b"N(0").end()), "empty stack"),
        ("no memo", zip(Pickler::new().raw(b"h\x07").end()), "did not remember"),
        ("no end", zip(Pickler::new().op(b'}').0), "a value claims 1 bytes, and 0 follow"),
        (
            "a string",
            zip(Pickler::new().op(b'X').raw(&u32::MAX.to_le_bytes()).end()),
            "more than 67108864 bytes in a string",
        ),
        (
            "bytes",
            zip(Pickler::new().op(0x8e).raw(&(u64::MAX / 2).to_le_bytes()).end()),
            "a value claims 9223372036854775807 bytes",
        ),
        (
            "a number",
            zip(Pickler::new().op(0x8b).raw(&i32::MAX.to_le_bytes()).end()),
            "a value claims 2147483647 bytes",
        ),
        ("a line", zip(Pickler::new().op(b'c').raw(&[b'a'; 4096]).end()), "a line of more than 128 bytes"),
        ("marks", zip(Pickler::new().raw(&vec![b'('; (1 << 20) + 1]).end()), "more than 1048576 marks"),
        ("copies", zip(Pickler::new().op(b'N').raw(&vec![b'2'; 1 << 20]).end()), "values on its stack"),
        ("objects", zip(Pickler::new().raw(&b"]0".repeat(1 << 19)).raw(b"]").end()), "more than 524288 objects"),
        ("nested", nested(100_000), "nested more than 64 deep"),
        ("laughs", laughs, "lead to more than"),
        ("itself", zip(Pickler::new().raw(b"]q\x00h\x00a").end()), "nested more than 64 deep"),
        (
            "long key",
            zip(Pickler::new().op(b'}').text(&"k".repeat(600)).tensor("0", 1, 0, &[1], &[1]).op(b's').end()),
            "more than 512 bytes",
        ),
        // tensors that are not there
        ("expanded", zip(Pickler::one(1, 0, &[1 << 20, 1 << 20], &[0, 0])), "more than the file can hold"),
        ("uncountable", zip(Pickler::one(1, 0, &[1 << 40, 1 << 40], &[0, 0])), "more than the file can hold"),
        ("beyond", zip(Pickler::one(1, 1, &[1], &[1])), "reaches beyond the 1 numbers"),
        ("far stride", zip(Pickler::one(1, 0, &[2], &[i64::MAX])), "reaches beyond the 1 numbers"),
        ("negative side", zip(Pickler::one(1, 0, &[-1], &[1])), "the arguments of `torch._utils._rebuild_tensor_v2`"),
        ("negative offset", zip(Pickler::one(1, -1, &[1], &[1])), "the arguments of `torch._utils._rebuild_tensor_v2`"),
        ("strides", zip(Pickler::one(1, 0, &[1, 1], &[1])), "2 dimensions and 1 strides"),
        ("storage", archive(&Pickler::one(1, 0, &[1], &[1]), &[]), "`archive/data/0` is missing"),
        ("short storage", zip(Pickler::one(2, 0, &[2], &[1])), "claims 2 numbers, and has 4 bytes"),
        ("long storage", zip(Pickler::one(i64::MAX, 0, &[1], &[1])), "claims 9223372036854775807 numbers"),
        (
            "quantised",
            zip(Pickler::new().storage("QInt8Storage", "0", 1).end()),
            "`torch.QInt8Storage`, which is not read",
        ),
        // archives
        ("members", patched(two, b"data/1", b"data/0"), "two members of one name"),
        ("compressed", patched(zip(Pickler::one(1, 0, &[1], &[1])), b"\x0a\0\0\0\0\0", b"\x0a\0\0\0\x08\0"), "archive"),
        ("cut archive", truncated(zip(Pickler::one(1, 0, &[1], &[1])), 30), "archive of torch and is none"),
        ("arrays", members_of("x", &[("a.npy".to_owned(), ONE)]), "NumPy arrays"),
        ("other", members_of("x", &[("a.txt".to_owned(), ONE)]), "without `data.pkl`"),
        (
            "script",
            members_of("x", &[("data.pkl".to_owned(), b"N."), ("constants.pkl".to_owned(), b"N.")]),
            "TorchScript",
        ),
        // before 1.6
        ("other pickle", Pickler::new().op(b'}').end(), "not one that `torch.save` wrote"),
        (
            "count",
            legacy(&Pickler::one(1, 0, &[1], &[1]), &[("0", u64::MAX, ONE)]),
            "claims 18446744073709551615 numbers",
        ),
        ("no tensor", legacy(&Pickler::one(1, 0, &[1], &[1]), &[("9", 1, ONE)]), "storage `9` is of no tensor"),
        (
            "other count",
            legacy(&Pickler::one(2, 0, &[1], &[1]), &[("0", 1, ONE)]),
            "has 1 numbers, and its tensor says 2",
        ),
        ("gone", legacy(&Pickler::one(1, 0, &[1], &[1]), &[]), "storage `0` is missing"),
        ("cut storage", truncated(legacy(&Pickler::one(1, 0, &[1], &[1]), &[("0", 1, ONE)]), 1), "more than follow"),
        ("nothing", archive(&Pickler::new().op(b'}').end(), &[]), "it holds no tensors"),
        ("unknown", zip(Pickler::one(1, 0, &[1], &[1])), "of no network that is supported: \"a\""),
    ]
}

#[test]
fn harm_is_refused_in_a_sentence_with_a_hint() {
    for (name, bytes, words) in harmful() {
        let (_folder, path) = on_disk("weights.pth", &bytes);
        let error = use_up(&path).err().unwrap_or_else(|| panic!("{name}: taken"));
        assert!(error.problem().contains(words), "{name}: {}", error.problem());
        assert!(!error.problem().contains('\n') && error.problem().len() < 400, "{name}: {}", error.problem());
        assert!(error.hint().len() > 10 && !error.hint().contains('\n'), "{name}: {}", error.hint());
        assert!(error.to_string().starts_with(&format!("{}: ", path.display())), "{error}");
    }
}

#[test]
fn an_index_names_files_beside_it_and_nothing_else() {
    let whole = safetensors(&tiny_vit().tensors());
    let (folder, _) = on_disk("one.safetensors", &whole);
    let refused = |text: &str, words: &str| {
        let path = folder.path().join("model.safetensors.index.json");
        std::fs::write(&path, text).unwrap();
        let error = Checkpoint::open(&path).unwrap_err();
        assert!(error.problem().contains(words), "{error}");
    };
    refused("{\"weight_map\": {\"a\": \"../one.safetensors\"}}", "not a file beside it");
    refused("{\"weight_map\": {\"a\": \"/etc/passwd\"}}", "not a file beside it");
    refused("{\"weight_map\": {\"a\": \"..\"}}", "not a file beside it");
    refused("{\"weight_map\": {\"a\": \"gone.safetensors\"}}", "which is not there");
    refused("{\"weight_map\": {\"a\": \"one.safetensors\"}}", "\"a\" is not in \"one.safetensors\"");
    refused("{\"weight_map\": {\"a\": \"one.safetensors\", \"a\": \"one.safetensors\"}}", "\"a\" is there twice");
    refused("{\"weight_map\": {}}", "lists no files");
    refused("{}", "no index of weights");
    std::fs::write(
        folder.path().join("model.safetensors.index.json"),
        "{\"weight_map\": {\"cls_token\": \"one.safetensors\"}}",
    )
    .unwrap();
    assert_eq!(Checkpoint::open(folder.path()).unwrap().tensors().len(), tiny_vit().tensors().len(), "by its folder");
}

#[test]
fn values_that_are_not_finite_are_refused() {
    let tensors = tiny_vit().tensors();
    for (bad, words) in [(f32::NAN, "holds NaN"), (f32::INFINITY, "holds inf")] {
        let mut file = safetensors(&tensors);
        let end = file.len();
        file[end - 4..].copy_from_slice(&bad.to_le_bytes());
        let (_folder, path) = on_disk("weights.safetensors", &file);
        assert!(use_up(&path).unwrap_err().problem().contains(words));
    }
}

#[test]
fn old_views_of_storages_and_other_byte_orders_are_read() {
    // ("storage", type, key, device, 4 numbers, ("view", from 1, 2 numbers))
    let view = Pickler::new().op(b'(').text("view").int(1).int(2).op(b't').0[2..].to_vec();
    let storage = Pickler::new().op(b'(').text("storage").global("torch", "FloatStorage").text("0").text("cpu").int(4);
    let pickle = Pickler::new().op(b'}').text("a").global("torch._utils", "_rebuild_tensor").op(b'(');
    let pickle =
        pickle.raw(&storage.raw(&view).op(b't').op(b'Q').0[2..]).int(1).ints(&[1]).ints(&[1]).raw(b"tRs").end();
    let values: Vec<u8> = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let (_folder, path) = on_disk("old.pth", &legacy(&pickle, &[("0", 4, &values)]));
    assert_eq!(Checkpoint::open(&path).unwrap().read("a").unwrap(), [3.0], "offset 1 in the view, which begins at 1");

    let big: Vec<u8> = [1f32, 2.0].iter().flat_map(|v| v.to_be_bytes()).collect();
    let pickle = Pickler::one(2, 0, &[2], &[1]);
    let members =
        [("data.pkl".to_owned(), &pickle[..]), ("data/0".to_owned(), &big[..]), ("byteorder".to_owned(), b"big")];
    let (_folder, path) = on_disk("big.pth", &members_of("x", &members));
    assert_eq!(Checkpoint::open(&path).unwrap().read_f32("a").unwrap(), [1.0, 2.0]);
}

/// Structures as recipes have them.
const BACKBONES: [(&str, u32); 8] = [
    ("[vit]\npatch = 4\ndim = 16\ndepth = 2\nheads = 2", 16),
    (
        "[vit]\npatch = 4\ndim = 16\ndepth = 1\nheads = 2\nregisters = 3\nlayer_scale = 0.1\nqk_norm = true\nmlp = \"swiglu\"",
        16,
    ),
    (
        "[vit]\npatch = 4\ndim = 16\ndepth = 1\nheads = 2\nclass_token = false\npool = \"mean\"\nfc_norm = true\nqkv_bias = false",
        16,
    ),
    ("[vit]\npatch = 4\ndim = 16\ndepth = 1\nheads = 2\npre_norm = true\nregisters = 1\nprefix_positions = true", 16),
    ("[vit]\npatch = 4\ndim = 16\ndepth = 1\nheads = 2\nposition = \"rope\"\nregisters = 2", 16),
    ("[resnet]\ndepth = 18\nwidth = 0.125\nstem = \"cifar\"", 32),
    ("[resnet]\ndepth = 50\nwidth = 0.125", 32),
    ("[convnext]\ndepths = [1, 2, 1, 1]\ndims = [8, 12, 24, 32]\npatch = 2\nkernel = 3\nlayer_scale = 0", 32),
];

#[test]
fn structures_list_the_tensors_of_our_networks() {
    for (text, size) in BACKBONES {
        let config: BackboneConfig = toml::from_str(text).unwrap();
        let arch = Arch::from_config(&config, size).unwrap();
        let network = Backbone::new(&config, size, &Scope::new(0, &crate::backend::host())).unwrap();
        let layout = params::Layout::of(&network);
        let built = layout.entries().iter().map(|entry| (entry.path.clone(), entry.shape.clone()));
        assert_eq!(arch.tensors(), built.collect(), "{text}");
    }
}

#[test]
fn structures_are_read_off_shapes() {
    for (text, size) in BACKBONES {
        let config: BackboneConfig = toml::from_str(text).unwrap();
        let arch = Arch::from_config(&config, size).unwrap();
        let (_folder, path) = on_disk("weights.safetensors", &safetensors(&arch.tensors()));
        let checkpoint = Checkpoint::open(&path).unwrap();
        let hints = Hints { heads: Some(2), image: Some([size as usize; 2]) };
        let found = Found::find(&checkpoint, &hints).unwrap();
        let fit = found.fit(&arch);
        assert_eq!((fit.num_matched(), fit.left_over.len()), (fit.rows.len(), 0), "{text}: {fit:?}");
        assert_eq!(found.arch().tensors(), arch.tensors(), "{text}");
        let again = found.arch().config().unwrap();
        assert_eq!(Arch::from_config(&again, size).unwrap().tensors(), arch.tensors(), "{text}");
        for row in &fit.rows {
            assert_eq!(row.fate, Fate::Loaded, "{row:?}");
        }
    }
}

/// Named networks are found by name.
#[test]
fn published_sizes_give_the_tables_that_recipes_have() {
    for (text, size) in [
        ("[vit]\nsize = \"giant\"\npatch = 14\nmlp = \"swiglu\"\nlayer_scale = 1e-5", 518),
        ("[vit]\nsize = \"small\"\npatch = 14\nregisters = 4\nlayer_scale = 1e-5", 518),
        ("[vit]\nsize = \"base\"\npatch = 16", 224),
        ("[resnet]\ndepth = 50", 224),
        ("[convnext]\nsize = \"base\"", 224),
    ] {
        let config: BackboneConfig = toml::from_str(text).unwrap();
        assert_eq!(Arch::from_config(&config, size).unwrap().config().unwrap(), config, "{text}");
    }
}

#[test]
fn a_file_for_another_size_is_adapted() {
    let arch = |text: &str, size| Arch::from_config(&toml::from_str(text).unwrap(), size).unwrap();
    let there = arch("[vit]\npatch = 4\ndim = 8\ndepth = 1\nheads = 2", 16);
    let (_folder, path) = on_disk("weights.safetensors", &safetensors(&there.tensors()));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let found = Found::find(&checkpoint, &Hints { heads: Some(2), image: None }).unwrap();
    let here = arch("[vit]\npatch = 8\ndim = 8\ndepth = 1\nheads = 2", 56);
    let fit = found.fit(&here);
    assert_eq!(fit.num_matched(), fit.rows.len());
    let changed: Vec<&str> = fit.rows.iter().filter_map(|row| row.fate.change()).collect();
    assert_eq!(
        changed,
        [
            "patches of 4 px resampled to 8 px (FlexiViT's pseudo-inverse)",
            "positions of 4 x 4 patches resampled to 7 x 7 (bicubic, antialiased)"
        ]
    );
    let tensors = found.load(&here).unwrap();
    assert_eq!(tensors["pos_embed"].0, [1, 50, 8]);
    assert_eq!(
        tensors["pos_embed"].1[..8],
        checkpoint.read_f32("pos_embed").unwrap()[..8],
        "the class token's is kept"
    );
    assert_eq!(tensors["patch_embed.proj.weight"].1.len(), 8 * 3 * 8 * 8);
}

#[test]
fn a_patch_embedding_gives_the_same_tokens_after_both_are_enlarged() {
    // a smooth patch and a kernel, both enlarged: their product stays (FlexiViT, equation 3: exact for enlarging)
    let (old, new) = (4, 8);
    let kernel: Vec<f32> = (0..16).map(|i| (i as f32 * 1.3).sin()).collect();
    let patch: Vec<f32> = (0..16).map(|i| (i as f32 * 0.4).cos()).collect();
    let kind = crate::model::position::Bicubic::Antialias;
    let larger = resample_patches(&kernel, [old; 2], [new; 2], kind).unwrap();
    let enlarged = resample_positions(&patch, [old; 2], [new; 2], kind);
    let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    assert!((product(&larger, &enlarged) - product(&kernel, &patch)).abs() < 1e-4);
}

#[test]
fn channels_are_summed_or_repeated() {
    let weights = [1.0, 2.0, 4.0, 10.0, 20.0, 40.0]; // two outputs of three channels
    assert_eq!(adapt_channels(&weights, 3, 1, 1), [7.0, 70.0]);
    assert_eq!(adapt_channels(&weights, 3, 4, 1), [0.75, 1.5, 3.0, 0.75, 7.5, 15.0, 30.0, 7.5]);
    assert_eq!(adapt_channels(&[3.0], 1, 3, 1), [1.0, 1.0, 1.0], "a grey image in three channels gives the same");
}

#[test]
fn the_network_that_authors_evaluate_is_taken() {
    let under = |prefixes: &[&str]| {
        let tensors = tiny_vit().tensors();
        let all = prefixes
            .iter()
            .flat_map(|prefix| tensors.iter().map(move |(name, shape)| (format!("{prefix}{name}"), shape.clone())));
        let (_folder, path) = on_disk("weights.safetensors", &safetensors(&all.collect()));
        let checkpoint = Checkpoint::open(&path).unwrap();
        let found = Found::find(&checkpoint, &Hints::default()).unwrap();
        assert!(found.fit(found.arch()).left_over.is_empty(), "{:?}", found.fit(found.arch()).left_over);
        assert_eq!(found.others().len(), prefixes.len() - 1);
        found.prefix().to_owned()
    };
    assert_eq!(under(&["student.module.backbone.", "teacher.backbone."]), "teacher.backbone.");
    assert_eq!(under(&["module.encoder_k.", "module.encoder_q."]), "module.encoder_q.");
    assert_eq!(under(&["module.momentum_encoder.", "module.base_encoder."]), "module.base_encoder.");
    assert_eq!(under(&["encoder.module.", "target_encoder.module."]), "target_encoder.module.");
    assert_eq!(under(&["momentum_backbone.", "backbone."]), "backbone.");
    assert_eq!(under(&["", "momentum_encoder."]), "");
    assert_eq!(under(&["model._orig_mod.something."]), "model._orig_mod.something.");
}

#[test]
fn networks_that_look_alike_are_refused_by_name() {
    let with = |name: &str, shape: &[usize]| {
        let mut tensors = tiny_vit().tensors();
        tensors.insert(name.to_owned(), shape.to_vec());
        let (_folder, path) = on_disk("weights.safetensors", &safetensors(&tensors));
        use_up(&path)
    };
    assert!(with("dist_token", &[1, 1, 8]).unwrap_err().problem().contains("distillation token"));
    assert!(
        with("blocks.0.attn.relative_position_bias_table", &[9, 2])
            .unwrap_err()
            .problem()
            .contains("relative position")
    );
    assert!(with("head.weight", &[10, 8]).is_ok(), "a classifier is no part of a backbone");
    let mobile = [
        ("features.0.0.weight".to_owned(), vec![8, 3, 3, 3]),
        ("features.1.conv.0.0.weight".to_owned(), vec![8, 1, 3, 3]),
    ];
    let (_folder, path) = on_disk("weights.safetensors", &safetensors(&mobile.into_iter().collect()));
    assert!(use_up(&path).unwrap_err().problem().contains("those of a MobileNetV2, which is not supported"));
}

#[test]
fn what_is_missing_is_paired_with_what_is_like_it() {
    let mut tensors = tiny_vit().tensors();
    let shape = tensors.remove("blocks.0.mlp.fc2.weight").unwrap();
    tensors.insert("blocks.0.mlp.fc2_weight".to_owned(), shape);
    let (_folder, path) = on_disk("weights.safetensors", &safetensors(&tensors));
    let checkpoint = Checkpoint::open(&path).unwrap();
    // without that layer its structure cannot be told
    assert!(Found::find(&checkpoint, &Hints::default()).unwrap_err().problem().contains("`blocks.0.mlp.fc2.weight`"));
    let mut tensors = tiny_vit().tensors();
    let shape = tensors.remove("blocks.0.norm2.bias").unwrap();
    tensors.insert("blocks.0.norm2.bais".to_owned(), shape);
    let (_folder, path) = on_disk("weights.safetensors", &safetensors(&tensors));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let found = Found::find(&checkpoint, &Hints::default()).unwrap();
    let fit = found.fit(found.arch());
    assert_eq!(fit.nearest(), [("blocks.0.norm2.bias", "blocks.0.norm2.bais")]);
    assert!(fit.matched() < 1.0);
}
