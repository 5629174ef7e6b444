//! The mistakes that are made, word for word.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;

const SIMCLR: &str = r#"[data]
source = "sample"

[[views]]
count = 2
size = 32
crop = { scale = [0.2, 1.0] }

[backbone.resnet]
depth = 18

[method.simclr]
temperature = 0.5

[batch]
global = 256
micro = 32

[optimizer.sgd]

[schedule]
epochs = 10
lr = 0.1
"#;

const MAE: &str = r#"[data]
source = "sample"
[[views]]
size = 32
[backbone.vit]
patch = 4
[method.mae]
decoder_dim = 64
decoder_heads = 2
[batch]
global = 256
micro = 32
[optimizer.adamw]
[schedule]
steps = 10
lr = 0.1
"#;

fn read(text: &str, overrides: &[&str]) -> Result<Recipe, String> {
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    parse(Path::new("a.toml"), text, &overrides).map(|loaded| loaded.recipe).map_err(|error| error.render(false))
}

/// The report on `SIMCLR` with one line replaced.
fn report_on(old: &str, new: &str) -> String {
    assert!(SIMCLR.contains(old), "{old}");
    read(&SIMCLR.replacen(old, new, 1), &[]).expect_err("the recipe is wrong")
}

fn report_of(text: &str, overrides: &[&str]) -> String {
    read(text, overrides).expect_err("the recipe is wrong")
}

#[test]
fn good_recipes_load() {
    assert_eq!(read(SIMCLR, &[]).unwrap().inputs().num_views(), 2);
    assert_eq!(read(MAE, &[]).unwrap().inputs().num_views(), 1);
    assert_eq!(read(&SIMCLR.replace('\n', "\r\n"), &[]).unwrap(), read(SIMCLR, &[]).unwrap());
}

#[test]
fn a_misspelt_key_is_underlined_and_corrected() {
    let expected = "\
error: a.toml:13:1: unknown key `temprature`
   |
13 | temprature = 0.5
   | ^^^^^^^^^^
   |
hint: did you mean `temperature`?";
    assert_eq!(report_on("temperature", "temprature"), expected);
}

#[test]
fn an_unknown_key_lists_what_is_allowed_or_where_it_belongs() {
    let message = report_on("depth = 18", "depth = 18\nfoo = 1");
    assert!(
        message.ends_with("hint: allowed in `backbone.resnet`: `depth`, `stem`, `width` and `zero_init_residual`"),
        "{message}"
    );
    let message = report_on("lr = 0.1", "lr = 0.1\nnorm_pix = true");
    assert!(message.ends_with("hint: `norm_pix` is a key of `method.mae`"), "{message}");
    let message = report_on("lr = 0.1", "lr = 0.1\nseed = 1");
    assert!(message.ends_with("hint: `seed` belongs at the top, before the first table"), "{message}");
}

#[test]
fn a_value_of_the_wrong_type_is_shown() {
    let expected = "\
error: a.toml:17:9: `batch.micro` must be a whole number, found the string \"32\"
   |
17 | micro = 32\"32\"
   |         ^^^^"
        .replace("32\"32\"", "\"32\"");
    assert_eq!(report_on("micro = 32", "micro = \"32\""), expected);
    let cases = [
        ("micro = 32", "micro = 32.5", "`batch.micro` must be a whole number, found the number 32.5"),
        ("micro = 32", "micro = -1", "`batch.micro` is -1, but must be at least 0"),
        ("lr = 0.1", "lr = true", "`schedule.lr` must be a number, found `true`"),
        ("scale = [0.2, 1.0]", "scale = [0.2]", "`views.0.crop.scale` has 1 element, but needs 2"),
        ("scale = [0.2, 1.0]", "scale = 0.2", "`views.0.crop.scale` must be a list of 2 values, found the number 0.2"),
        ("crop = { scale = [0.2, 1.0] }", "crop = 1", "`views.0.crop` must be a table, found the number 1"),
        ("[[views]]", "[views]", "`views` must be a list of tables, found a table"),
        ("source = \"sample\"", "source = 1", "`data.source` must be one of"),
        ("source = \"sample\"", "source = \"sample\"\npath = 3", "`data.path` must be a string, found the number 3"),
    ];
    for (old, new, expected) in cases {
        let message = report_on(old, new);
        assert!(message.contains(expected), "{message}");
    }
    assert!(report_on("[[views]]", "[views]").ends_with("hint: write `[[views]]`, with two brackets"));
}

#[test]
fn what_is_missing_is_named() {
    assert!(report_on("lr = 0.1\n", "").starts_with("error: a.toml:21:2: missing key `lr` in `schedule`\n"));
    let message = report_on("[batch]\nglobal = 256\nmicro = 32", "");
    assert_eq!(message, "error: a.toml: missing table `[batch]`");
    let message = report_on("[optimizer.sgd]", "");
    let expected = "error: a.toml: missing table: one of `[optimizer.sgd]`, `[optimizer.adamw]`, `[optimizer.lars]`, \
                    `[optimizer.adam]`, `[optimizer.lamb]`, `[optimizer.lion]`";
    assert_eq!(message, expected);
    assert!(report_of("", &[]).contains("missing table `[data]`"));
}

#[test]
fn words_are_checked_against_their_list() {
    let expected = "\
error: a.toml:2:10: unknown source \"sampel\"
  |
2 | source = \"sampel\"
  |          ^^^^^^^^
  |
hint: did you mean `sample`?";
    assert_eq!(report_on("\"sample\"", "\"sampel\""), expected);
    let message = report_on("\"sample\"", "\"x\"");
    assert!(message.ends_with("hint: allowed: `sample`, `folder`, `list`, `cifar10` and `cifar100`"), "{message}");
}

#[test]
fn a_table_of_one_variant_is_explained() {
    let message = report_on("[method.simclr]", "[method.simclrr]");
    assert!(message.starts_with("error: a.toml:12:9: unknown method `simclrr`\n"), "{message}");
    assert!(message.ends_with("hint: did you mean `simclr`?"), "{message}");
    let message = report_on("[optimizer.sgd]", "[optimizer.sgd]\n[optimizer.lars]");
    assert!(message.contains("`optimizer` must be one table, but there are 2: `lars` and `sgd`"), "{message}");
    let message = report_on("[optimizer.sgd]", "[optimizer]");
    assert!(message.contains("a.toml:19:2: `optimizer` names no optimizer\n"), "{message}");
    let text = SIMCLR.replace("[method.simclr]\ntemperature = 0.5\n", "");
    let message = report_of(&format!("method = \"simclr\"\n{text}"), &[]);
    assert!(
        message.contains("found the string \"simclr\"") && message.ends_with("write `[method.simclr]`"),
        "{message}"
    );
}

#[test]
fn toml_that_does_not_parse_is_located() {
    let message = report_on("depth = 18", "depth =");
    assert!(message.starts_with("error: a.toml:10:8: "), "{message}");
    assert!(message.contains("10 | depth ="), "{message}");
    assert!(report_on("depth = 18", "depth = 18\ndepth = 34").starts_with("error: a.toml:11:1: duplicate key"));
}

#[test]
fn a_temperature_below_zero_is_refused() {
    let expected = "\
error: a.toml:13:15: `method.simclr.temperature` is -1, but must be greater than 0 and finite
   |
13 | temperature = -1
   |               ^^";
    assert_eq!(report_on("temperature = 0.5", "temperature = -1"), expected);
    assert!(report_on("temperature = 0.5", "temperature = nan").contains("is NaN, but must be"));
}

#[test]
fn a_batch_that_cannot_be_cut_names_the_nearest_that_can() {
    let expected = "\
error: a.toml:17:9: `batch.micro` is 48, which does not divide `batch.global`, 256
   |
17 | micro = 48
   |         ^^
   |
hint: set `batch.global` to 240 or 288, or `batch.micro` to 32 or 64";
    assert_eq!(report_on("micro = 32", "micro = 48"), expected);
    let message = report_on("micro = 32", "micro = 300");
    assert!(message.ends_with("hint: set `batch.global` to 300, or `batch.micro` to 256"), "{message}");
}

#[test]
fn mae_on_a_resnet_names_both_and_the_way_out() {
    let text = MAE.replace("[backbone.vit]\npatch = 4", "[backbone.resnet]\ndepth = 18");
    let expected = "\
error: a.toml:7:9: `method.mae` drops patches and needs `backbone.vit`, but the backbone is `resnet`
  |
7 | [method.mae]
  |         ^^^
  |
hint: write `[backbone.vit]`, or keep the resnet and write `[method.simclr]`";
    assert_eq!(report_of(&text, &[]), expected);
}

#[test]
fn an_image_that_is_no_multiple_of_the_patch_names_the_sizes_that_are() {
    let expected = "\
error: a.toml:4:8: `views.0.size` is 34, but must be a multiple of `backbone.vit.patch`, 4
  |
4 | size = 34
  |        ^^
  |
hint: use 32 or 36";
    assert_eq!(report_of(&MAE.replace("size = 32", "size = 34"), &[]), expected);
}

#[test]
fn all_problems_are_reported_at_once_in_order() {
    let text = SIMCLR.replace("depth = 18", "depth = 19").replace("count = 2", "count = 3").replace("= 0.5", "= 0");
    let lines: Vec<String> =
        report_of(&text, &[]).lines().filter(|line| line.starts_with("error")).map(str::to_owned).collect();
    let expected = [
        "error: a.toml:4:3: `method.simclr` compares 2 views of each image, but `views` makes 3",
        "error: a.toml:10:9: `backbone.resnet.depth` is 19, but must be 18, 34, 50, 101 or 152",
        "error: a.toml:13:15: `method.simclr.temperature` is 0, but must be greater than 0 and finite",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn every_limit_is_checked() {
    let simclr = [
        ("views.0.flip=1.5", "must be from 0 to 1"),
        ("views.0.crop.scale=[0.5, 0.2]", "the smaller number first"),
        ("views.0.crop.scale=[0.5, 1.2]", "at most 1"),
        ("views.0.crop.ratio=[0, 1]", "greater than 0"),
        ("views.0.jitter={brightness=0.4, contrast=0.4, saturation=-0.4, hue=0.1}", "saturation` is -0.4"),
        ("views.0.jitter={brightness=0.4, contrast=0.4, saturation=0.4, hue=0.6}", "from 0 to 0.5"),
        ("views.0.blur={prob=0.5, kernel=4}", "kernel` is 4, but must be odd"),
        ("views.0.size=0", "must be at least 1"),
        ("batch.micro=0", "must be at least 1"),
        ("batch.global=100", "`batch.micro` is 32, which does not divide `batch.global`, 100"),
        ("backbone.resnet.width=0.001", "makes 0 channels of 64"),
        ("views.0.size=9999", "the limits are 1 and 4096 pixels"),
        ("method.simclr.layers=0", "must be at least 1"),
        ("optimizer.sgd.momentum=1", "less than 1"),
        ("schedule.lr=inf", "finite"),
        ("schedule.lr=0", "greater than 0"),
        ("schedule.min_lr=0.2", "at most `schedule.lr`, 0.1"),
        ("schedule.warmup_epochs=11", "longer than the 10 epochs"),
        ("schedule.clip_norm=0", "greater than 0"),
        ("schedule.clip_each_norm=-1", "greater than 0"),
        ("schedule.warmup_lr=0.2", "at most `schedule.lr`, 0.1"),
        ("schedule.decay=multistep", "`schedule.milestones` is empty"),
        ("schedule.milestones=[1]", "has no effect, as `schedule.decay` is not \"multistep\""),
        ("schedule.gamma=0", "greater than 0"),
        ("schedule.weight_decay_end=-1", "at least 0"),
        ("optimizer.sgd.dampening=1", "less than 1"),
        ("parameters=[{match=\"*.bias\"}]", "`parameters.0` changes nothing for \"*.bias\""),
        ("parameters=[{lr_scale=-1}]", "`parameters.0.lr_scale` is -1, but must be at least 0"),
        (
            "parameters=[{layer_decay=1.5}]",
            "`parameters.0.layer_decay` is 1.5, but must be greater than 0 and at most 1",
        ),
        ("parameters=[{weight_decay=0, decay_scale=0}]", "gives both `weight_decay` and `decay_scale`"),
        ("parameters=[{frozen=true, freeze_steps=3}]", "gives both `frozen` and `freeze_steps`"),
        ("checkpoint.keep=0", "must be at least 1"),
        ("ema.momentum=1", "less than 1"),
        ("eval.k=0", "must be at least 1"),
        ("eval.k=20000", "at most `eval.max_train`, 10000"),
        ("data.max_bad=2", "must be from 0 to 1"),
        ("data.source=folder", "needs `data.path`"),
        ("data.std=[1, 1, 0]", "`data.std.2` is 0"),
        ("name=a/b", "not a folder name"),
    ];
    let mae = [
        ("method.mae.mask_ratio=1", "less than 1"),
        ("method.mae.mask_ratio=0.999", "keeps none of the 64 patches"),
        ("views.0.size=4", "is 4, a single patch, but `method.mae` needs some to keep and some to remove"),
        ("method.mae.decoder_dim=65", "must be a multiple of `method.mae.decoder_heads`, 2"),
        ("backbone.vit.patch=5", "must be a multiple of `backbone.vit.patch`, 5"),
        ("views.0.count=2", "reconstructs 1 view"),
        ("backbone.vit.heads=5", "must be a multiple of `backbone.vit.heads`, 5"),
        ("backbone.vit.class_token=false", "there is no class token"),
        ("optimizer.adamw.betas=[0.9, 1.0]", "`optimizer.adamw.betas.1` is 1, but must be"),
    ];
    let dinov2 = [
        ("method.dinov2.prototypes=1", "at least 2"),
        ("method.dinov2.prototypes=2000000", "at most 1048576"),
        ("method.dinov2.shared_head=true", "`method.dinov2.patch_bottleneck` is 32, but `method.dinov2.shared_head`"),
        ("method.dinov2.teacher_temperature={start=0, end=0.1}", "`method.dinov2.teacher_temperature.start` is 0"),
        ("method.dinov2.momentum={start=0.9, end=1.1}", "`method.dinov2.momentum.end` is 1.1"),
        ("method.dinov2.center_momentum=1", "less than 1"),
        ("method.dinov2.mask_prob=2", "from 0 to 1"),
        ("method.dinov2.mask_ratio=[0.5, 1.0]", "less than 1: a view needs patches that are seen"),
        ("batch.micro=1", "KoLeo of `method.dinov2` needs another image in each micro-batch"),
        ("views.0.count=1", "`views.1.size` is 16, but the first 2 views, which the teacher sees, need one size, 32"),
        ("views.1.size=64", "larger than the 32 pixels of the first 2 views"),
        ("backbone.vit.patch=16", "is 32, 2 x 2 patches, but `method.dinov2` hides blocks of at least 4 x 4"),
        ("views=[{size=32}]", "`method.dinov2` compares at least 2 views of each image, but `views` makes 1"),
    ];
    let dinov2_text = MAE
        .replace("[[views]]\nsize = 32", "[[views]]\ncount = 2\nsize = 32\n[[views]]\nsize = 16")
        .replace("mae]\ndecoder_dim = 64\ndecoder_heads = 2", "dinov2]\nfreeze_epochs = 1\npatch_bottleneck = 32");
    for (text, cases) in [(SIMCLR, &simclr[..]), (MAE, &mae[..]), (&dinov2_text, &dinov2[..])] {
        for (change, expected) in cases {
            let message = report_of(text, &[change]);
            assert!(message.starts_with(&format!("error: override `{change}`: ")), "{message}");
            assert!(message.contains(expected), "{change}: {message}");
        }
    }
}

#[test]
fn methods_that_hide_patches_refuse_a_residual_network() {
    for name in ["ibot", "dinov2"] {
        let message = report_of(&SIMCLR.replace("simclr]\ntemperature = 0.5", &format!("{name}]")), &[]);
        let expected = format!("`method.{name}` hides patches and needs `backbone.vit`, but the backbone is `resnet`");
        assert!(message.contains(&expected), "{message}");
    }
    read(&SIMCLR.replace("simclr]\ntemperature = 0.5", "dino]"), &[]).unwrap();
}

#[test]
fn overrides_change_add_and_reach_into_lists() {
    let recipe = read(
        SIMCLR,
        &[
            "batch.micro=64",
            "views.0.size=48",
            "views.0.crop.scale.0=0.5",
            "name=my-run",
            "ema.momentum=0.99",
            "seed = 3",
        ],
    )
    .unwrap();
    assert_eq!((recipe.batch.micro, recipe.views[0].size, recipe.seed), (64, 48, 3));
    assert_eq!(recipe.views[0].crop.as_ref().unwrap().scale, [0.5, 1.0]);
    assert_eq!(recipe.name.as_deref(), Some("my-run"));
    assert_eq!(recipe.ema.unwrap().momentum, 0.99);
    assert_eq!(read(SIMCLR, &["name=2026-01-01"]).unwrap().name.as_deref(), Some("2026-01-01"));
    assert_eq!(
        read(SIMCLR, &["data.source=list", "data.path=~/a b/c.txt"]).unwrap().data.path,
        Some(PathBuf::from("~/a b/c.txt"))
    );
}

#[test]
fn an_override_takes_the_place_of_its_alternative() {
    let recipe = read(SIMCLR, &["schedule.steps=7"]).unwrap();
    assert_eq!((recipe.schedule.steps, recipe.schedule.epochs), (Some(7), None));
    let recipe = read(MAE, &["schedule.epochs=7"]).unwrap();
    assert_eq!((recipe.schedule.steps, recipe.schedule.epochs), (None, Some(7.0)));
    let both = report_of(SIMCLR, &["schedule.steps=7", "schedule.epochs=2"]);
    assert!(both.contains("both `epochs` and `steps`"), "{both}");
    let frozen = format!("{MAE}[[parameters]]\nmatch = \"*\"\nfreeze_epochs = 1.0\n");
    let recipe = read(&frozen, &["parameters.0.freeze_steps=3"]).unwrap();
    assert_eq!((recipe.parameters[0].freeze_steps, recipe.parameters[0].freeze_epochs), (Some(3), None));
}

#[test]
fn a_wrong_override_is_named() {
    let cases = [
        ("batch.micro=abc", "`batch.micro` must be a whole number, found the string \"abc\""),
        ("method.simclr.temprature=1", "unknown key `temprature`\nhint: did you mean `temperature`?"),
        ("views.3.size=3", "`views` has 1 element, the last is `views.0`"),
        ("views.size=3", "`views` is a list; write an index, such as `views.0.size`"),
        ("views.0=3", "`views.0` is a table; set one of its keys"),
        ("batch.micro.x=3", "`batch.micro` is not a table, it has no key `x`"),
        ("resume", "an override has the form `key.sub=value`\nhint: options such as `--ranks 2` begin with two dashes"),
        ("seed=", "no value after `=`\nhint: for an empty string write `key='\"\"'`"),
        (
            "method.mae.mask_ratio=0.75",
            "`method` must be one table, but there are 2: `mae` and `simclr`\n\
             hint: keep one; an override cannot switch the method, start from a recipe that has it",
        ),
    ];
    for (change, expected) in cases {
        assert_eq!(report_of(SIMCLR, &[change]), format!("error: override `{change}`: {expected}"));
    }
}

#[test]
fn files_that_cannot_be_read_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("simclr.toml");
    fs::write(&path, SIMCLR).unwrap();
    assert!(load(&path, &[]).is_ok());

    let error = load(&folder.path().join("simcrl.toml"), &[]).unwrap_err();
    let shown = folder.path().display();
    let expected = format!("error: {shown}/simcrl.toml: no such recipe\nhint: did you mean `{shown}/simclr.toml`?");
    assert_eq!(error.render(false), expected);

    let error = load(folder.path(), &[]).unwrap_err();
    assert!(error.render(false).ends_with("hint: this is a folder; give the path of a TOML file"));

    fs::write(&path, b"seed = 1\nname = \"caf\xe9\"\n").unwrap();
    let error = load(&path, &[]).unwrap_err();
    let expected =
        format!("error: {shown}/simclr.toml:2: not UTF-8 at byte 20 (value 0xe9)\nhint: save the file as UTF-8");
    assert_eq!(error.render(false), expected);

    fs::write(&path, b"\xff\xfes\0e\0").unwrap();
    let error = load(&path, &[]).unwrap_err();
    assert!(error.render(false).ends_with("hint: this looks like UTF-16; save the file as UTF-8"));
}

#[test]
fn colours_only_when_asked_for() {
    let error = parse(Path::new("a.toml"), "x = 1", &[]).unwrap_err();
    assert!(!error.render(false).contains('\x1b'));
    assert!(error.render(true).contains('\x1b'));
}

#[test]
fn a_recipe_written_out_reads_back_the_same() {
    for text in [SIMCLR, MAE] {
        let recipe = read(text, &[]).unwrap();
        let written = recipe.to_toml().unwrap();
        assert_eq!(read(&written, &[]).unwrap(), recipe, "{written}");
    }
}

#[test]
fn methods_check_their_tables_against_views_and_batch() {
    let local = "views.0.count=1";
    let cases = [
        ("byol", "batch.micro=1", "`batch.micro` is 1, but the batch norms of `method.byol`"),
        ("byol", "method.byol.momentum={start=0.9, end=1.5}", "must be from 0 to 1"),
        ("simsiam", "batch.micro=1", "`batch.micro` is 1, but the batch norms of `method.simsiam`"),
        ("simsiam", "views.0.count=3", "`method.simsiam` compares 2 views of each image, but `views` makes 3"),
        ("barlow", "method.barlow.lambda=-1", "at least 0"),
        ("barlow", "method.barlow.out=20000", "at most 16384: the loss has `out` x `out` numbers"),
        ("vicreg", "method.vicreg.variance=-1", "at least 0"),
        ("vicreg", "views.0.count=1", "`method.vicreg` compares 2 views"),
        ("lejepa", "batch.micro=1", "`batch.micro` is 1, but the batch norms of `method.lejepa`"),
        ("lejepa", local, "`method.lejepa` compares views of an image, but `views` makes 1"),
        ("lejepa", "method.lejepa.lambda=1.5", "must be from 0 to 1"),
        ("lejepa", "method.lejepa.knots=1", "must be from 2 to 1000"),
        ("visreg", "method.visreg.slices=0", "must be at least 1"),
        ("visreg", local, "`method.visreg` compares views"),
    ];
    for (method, change, expected) in cases {
        let text = SIMCLR.replace("[method.simclr]\ntemperature = 0.5", &format!("[method.{method}]"));
        read(&text, &[]).unwrap_or_else(|message| panic!("{message}"));
        let message = report_of(&text, &[change]);
        assert!(message.starts_with(&format!("error: override `{change}`: ")), "{message}");
        assert!(message.contains(expected), "{change}: {message}");
        // one image: nothing to compare with, no statistics
        let message = report_of(&text, &["batch.global=1", "batch.micro=1"]);
        assert!(message.contains("is 1, but "), "{message}");
    }
    let table = "crop = { scale = [0.2, 1.0] }\n\n[[views]]\nsize = 64\n";
    let message = report_of(
        &SIMCLR
            .replace("[method.simclr]\ntemperature = 0.5", "[method.lejepa]")
            .replace("crop = { scale = [0.2, 1.0] }\n", table),
        &[],
    );
    assert!(message.contains("`views.1.size` is 64, larger than the 32 of the table before"), "{message}");
}

#[test]
fn the_recipes_of_this_repository_are_good() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes");
    let files = walkdir::WalkDir::new(root).into_iter().map(Result::unwrap).map(walkdir::DirEntry::into_path);
    let recipes: Vec<_> = files.filter(|path| path.extension().is_some_and(|extension| extension == "toml")).collect();
    assert!(recipes.len() >= 4, "{recipes:?}");
    for path in recipes {
        if let Err(error) = load(&path, &[]) {
            panic!("{}", error.render(false));
        }
    }
}

/// Pieces that recipes are made of, so that random texts get beyond the parser.
fn fragment() -> impl Strategy<Value = String> {
    let pieces = [
        "seed",
        "=",
        "\n",
        "1",
        "-1",
        "0.5",
        "nan",
        "\"sample\"",
        "\"é\"",
        "[",
        "]",
        "{",
        "}",
        ",",
        ".",
        "[[views]]\n",
        "[data]\n",
        "source",
        "[method.simclr]\n",
        "[method.mae]\n",
        "temperature",
        "[backbone.vit]\n",
        "patch",
        "size",
        "#",
        "true",
        "2020-01-01",
        "9223372036854775807",
        "batch",
        "micro",
        "views",
        " ",
        "\r\n",
        "\u{feff}",
        "'''",
        "\t",
    ];
    prop_oneof![4 => proptest::sample::select(pieces.to_vec()).prop_map(str::to_owned), 1 => ".{0,3}"]
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(
        pieces in proptest::collection::vec(fragment(), 0..40),
        changes in proptest::collection::vec("[a-z0-9.=\\[\\]{}\"é -]{0,20}", 0..3),
    ) {
        let text = pieces.concat();
        if let Err(error) = parse(Path::new("a.toml"), &text, &changes) {
            prop_assert!(!error.render(true).is_empty());
        }
    }

    #[test]
    fn no_change_of_a_good_recipe_makes_it_panic(
        at in 0usize..SIMCLR.len(), removed in 0usize..12, inserted in fragment(), mae: bool,
    ) {
        let mut text = if mae { MAE } else { SIMCLR }.to_owned();
        let at = at.min(text.len());
        text.replace_range(at..(at + removed).min(text.len()), &inserted);
        if let Err(error) = parse(Path::new("a.toml"), &text, &[]) {
            prop_assert!(!error.render(false).is_empty());
        }
    }

    #[test]
    fn any_numbers_are_checked_without_panic(
        numbers in proptest::array::uniform6(prop_oneof![Just(0i64), 0..100i64, Just(i64::MAX)]),
        reals in proptest::array::uniform4(proptest::num::f64::ANY),
    ) {
        let [global, micro, size, count, patch, heads] = numbers;
        let text = MAE.replace("global = 256", &format!("global = {global}"))
            .replace("micro = 32", &format!("micro = {micro}"))
            .replace("size = 32", &format!("size = {}\ncount = {count}", size.min(i64::from(u32::MAX))))
            .replace("patch = 4", &format!("patch = {patch}\nheads = {heads}"));
        let changes: Vec<String> = ["schedule.lr", "schedule.warmup_epochs", "method.mae.mask_ratio", "backbone.vit.mlp_ratio"]
            .iter().zip(reals).map(|(key, value)| format!("{key}={}", toml::Value::Float(value))).collect();
        let _ = parse(Path::new("a.toml"), &text, &changes);
        if let Ok(recipe) = toml::from_str::<Recipe>(&text) {
            recipe.check();
        }
    }
}

#[test]
fn keys_of_schedule_and_clipping_that_contradict_are_refused() {
    let cases: [(&[&str], &str, &str); 5] = [
        (&["schedule.clip_norm=1", "schedule.clip_each_norm=3"], "but `schedule.clip_norm` clips too", "keep one"),
        (
            &["schedule.decay=constant", "schedule.min_lr=0.01"],
            "but `schedule.decay` doesn't go there",
            "remove `min_lr`",
        ),
        (
            &["schedule.decay=multistep", "schedule.milestones=[5, 3]"],
            "is [5.0, 3.0], but must be a list of rising epochs",
            "",
        ),
        (
            &["optimizer.sgd.nesterov=true", "optimizer.sgd.momentum=0"],
            "needs a momentum, but it is 0",
            "set `momentum = 0.9`",
        ),
        (
            &["optimizer.sgd.nesterov=true", "optimizer.sgd.dampening=0.5"],
            "but `dampening` is 0.5",
            "remove `dampening`",
        ),
    ];
    for (changes, expected, hint) in cases {
        let message = report_of(SIMCLR, changes);
        assert!(message.contains(expected) && message.contains(hint), "{message}");
    }
}

#[test]
fn rules_for_parameters_are_read_with_their_keys_checked() {
    let rules =
        "\n[[parameters]]\nmatch = \"backbone.*\"\nlayer_decay = 0.75\n[[parameters]]\nmax_rank = 1\nfrozen = true\n";
    let recipe = read(&format!("{SIMCLR}{rules}"), &[]).unwrap();
    assert_eq!(recipe.parameters[0].layer_decay, Some(0.75));
    assert_eq!((recipe.parameters[1].pattern.as_str(), recipe.parameters[1].frozen), ("*", Some(true)));
    let message = report_of(&format!("{SIMCLR}{}", rules.replace("layer_decay", "layer_deacy")), &[]);
    assert!(message.ends_with("hint: did you mean `layer_decay`?"), "{message}");
}
