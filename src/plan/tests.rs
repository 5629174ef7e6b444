use std::path::Path;

use super::*;
use crate::recipe::{Place, parse};

const RECIPE: &str = r#"[data]
source = "sample"
[[views]]
count = 2
size = 32
blur = { prob = 0.5 }
[backbone.resnet]
depth = 18
[method.simclr]
[batch]
global = 256
micro = 32
[optimizer.sgd]
[schedule]
epochs = 10
lr = 0.3
lr_scaling = "linear"
warmup_epochs = 1
"#;

fn facts(images: usize) -> DataFacts {
    let fingerprint = "abc".to_owned();
    DataFacts {
        images,
        classes: Some(10),
        description: "embedded sample".to_owned(),
        fingerprint,
        labels: Labels::default(),
    }
}

fn request(ranks: Ranks) -> Request {
    Request { name: "a".to_owned(), ranks, processes: 1, cores: 2, device: "cpu".to_owned(), bf16: Bf16::Emulated }
}

fn recipe(overrides: &[&str]) -> Recipe {
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    parse(Path::new("a.toml"), RECIPE, &overrides).unwrap().recipe
}

fn plan(images: usize, overrides: &[&str]) -> Result<Plan, Vec<Problem>> {
    Plan::new(recipe(overrides), facts(images), None, &request(Ranks::Auto))
}

fn problem(images: usize, overrides: &[&str]) -> (String, String) {
    let [problem] = <[Problem; 1]>::try_from(plan(images, overrides).unwrap_err()).unwrap();
    (problem.message, problem.hint.unwrap_or_default())
}

#[test]
fn sizes_steps_and_rates_follow_from_recipe_and_data() {
    let plan = plan(3000, &["batch.global=512"]).unwrap();
    assert_eq!((plan.steps_per_epoch, plan.steps, plan.warmup_steps), (5, 50, 5));
    assert_eq!((plan.micro_batches, plan.ranks, plan.workers), (16, 2, 2));
    assert_eq!((plan.lr, plan.min_lr, plan.epochs()), (0.6, 0.0, 10.0));
    assert_eq!(plan.lr_rule, "0.3 x 512 / 256, linear scaling");
    assert_eq!((plan.name.as_str(), plan.recipe.name.as_deref()), ("a", Some("a")));
    let sqrt = super::tests::plan(3000, &["schedule.lr_scaling=sqrt"]).unwrap();
    assert_eq!(sqrt.lr, 0.3 * 16.0);
    assert_eq!(super::tests::plan(3000, &["data.limit=300"]).unwrap().steps_per_epoch, 1);
}

#[test]
fn named_vit_sizes_are_written_out() {
    let text = RECIPE.replace("[backbone.resnet]\ndepth = 18", "[backbone.vit]\npatch = 4\nsize = \"tiny\"\ndepth = 6");
    let recipe = parse(Path::new("a.toml"), &text, &[]).unwrap().recipe;
    let plan = Plan::new(recipe, facts(3000), None, &request(Ranks::Auto)).unwrap();
    let crate::model::BackboneConfig::Vit(vit) = &plan.recipe.backbone else { panic!("another backbone") };
    assert_eq!((vit.dim, vit.depth, vit.heads), (Some(192), Some(6), Some(3)));
}

#[test]
fn batches_that_exceed_the_data_name_what_fits() {
    let (message, hint) = problem(200, &[]);
    assert_eq!(message, "`batch.global` is 256, more than the 200 images of `data`");
    assert_eq!(hint, "set `batch.global` to 192 or a smaller multiple of 32, or add images");
    let (message, hint) = problem(20, &[]);
    assert_eq!(message, "`batch.micro` is 32, more than the 20 images of `data`");
    assert_eq!(hint, "set `batch.micro` and `batch.global` to at most 20, or add images");
    assert_eq!(problem(0, &[]).0, "`data` has no images");
}

#[test]
fn a_warmup_longer_than_the_steps_is_refused() {
    let text = RECIPE.replace("epochs = 10", "steps = 5");
    let recipe = parse(Path::new("a.toml"), &text, &[]).unwrap().recipe;
    let problems = Plan::new(recipe, facts(3000), None, &request(Ranks::Auto)).unwrap_err();
    let expected = "`schedule.warmup_epochs` is 1, which is 11 steps, longer than the run's 5";
    assert_eq!(problems[0].message, expected);
    assert_eq!(problems[0].hint.as_deref(), Some("at 11 steps an epoch use at most 0.454"));
}

#[test]
fn any_number_of_ranks_up_to_the_micro_batches_shares_them_all() {
    for ranks in 1..=8 {
        let plan = Plan::new(recipe(&[]), facts(3000), None, &request(Ranks::Count(ranks))).unwrap();
        let owned: Vec<usize> = (0..ranks).flat_map(|rank| plan.owned_by(rank)).collect();
        assert_eq!(owned, (0..8).collect::<Vec<_>>());
        assert!((0..ranks).all(|rank| plan.owned_by(rank).len().abs_diff(8 / ranks) <= 1));
    }
    let problems = Plan::new(recipe(&[]), facts(3000), None, &request(Ranks::Count(9))).unwrap_err();
    assert_eq!(problems[0].place, Place::Argument("--ranks 9".to_owned()));
    assert_eq!(
        problems[0].to_string(),
        "`--ranks 9`: a step has 8 micro-batches of 32 images to share, fewer than 9 ranks"
    );
    let expected =
        "any number from 1 to 8 gives the same result; 9 would work with `batch.micro=16`, which is another run";
    assert_eq!(problems[0].hint.as_deref(), Some(expected));
}

#[test]
fn the_number_of_ranks_is_read() {
    assert_eq!("auto".parse(), Ok(Ranks::Auto));
    assert_eq!("3".parse(), Ok(Ranks::Count(3)));
    for wrong in ["0", "-1", "two", ""] {
        assert!(wrong.parse::<Ranks>().is_err());
    }
}

#[test]
fn the_plan_file_is_a_recipe_with_the_same_digest() {
    let changes = [
        "data.max_bad=0.1",
        "ema.momentum=0.99",
        "schedule.decay=multistep",
        "schedule.milestones=[6, 8.5]",
        "schedule.weight_decay_end=0.4",
        "schedule.clip_each_norm=3",
        "parameters=[{match=\"backbone.*\", layer_decay=0.9}, {max_rank=1, weight_decay=0.1, freeze_epochs=0.5}]",
    ];
    let first = plan(3000, &changes).unwrap();
    let text = first.to_toml().unwrap();
    let loaded = parse(Path::new("plan.toml"), &text, &[]).unwrap();
    assert_eq!(loaded.recipe, first.recipe);
    let request = Request {
        ranks: Ranks::Count(1),
        processes: 1,
        cores: 64,
        name: "plan".to_owned(),
        device: "cuda".to_owned(),
        bf16: Bf16::Native,
    };
    let again = Plan::new(loaded.recipe, facts(3000), None, &request).unwrap();
    assert_eq!(again.digest(), first.digest());
    assert_eq!(again.to_toml().unwrap().split_once("\n\n").unwrap().1, text.split_once("\n\n").unwrap().1);
}

#[test]
fn the_digest_sees_what_matters_and_nothing_else() {
    let digest = |overrides: &[&str]| plan(3000, overrides).unwrap().digest().to_owned();
    let same = [
        "name=b",
        "log.every_steps=1",
        "checkpoint.every_steps=7",
        "data.workers=3",
        "data.prefetch=1",
        "eval.k=5",
        "batch.memory=cache",
        "data.max_bad=0.5",
        "data.on_error=fail",
        "eval.test.source=sample",
    ];
    let moved = |path| digest(&["data.source=folder", path]);
    assert_eq!(moved("data.path=here"), moved("data.path=there"));
    for change in same {
        assert_eq!(digest(&[change]), digest(&[]), "{change}");
    }
    let other = [
        "seed=1",
        "batch.micro=64",
        "views.0.flip=0.5",
        "schedule.lr=0.2",
        "method.simclr.temperature=0.2",
        "data.mean=[0, 0, 0]",
        "ops.exact=true",
        "ops.plain=true",
        "schedule.warmup_lr=0.01",
        "schedule.decay=linear",
        "schedule.each=epoch",
        "schedule.weight_decay_end=0.4",
        "schedule.clip_each_norm=3",
        "parameters=[{match=\"*.bias\", lr_scale=2}]",
        "optimizer.sgd.dampening=0.1",
    ];
    for change in other {
        assert_ne!(digest(&[change]), digest(&[]), "{change}");
    }
    assert_ne!(plan(3001, &[]).unwrap().digest(), digest(&[]));
}

#[test]
fn a_folder_of_another_recipe_is_refused_with_what_differs() {
    let folder = tempfile::tempdir().unwrap();
    let first = plan(3000, &["ema.momentum=0.99"]).unwrap();
    assert!(!first.continues(folder.path()).unwrap());
    std::fs::write(folder.path().join("plan.toml"), first.to_toml().unwrap()).unwrap();
    assert!(first.continues(folder.path()).unwrap());
    assert!(plan(3000, &["ema.momentum=0.99", "log.every_steps=3"]).unwrap().continues(folder.path()).unwrap());

    let error = plan(3001, &["schedule.lr=0.2"]).unwrap().continues(folder.path()).unwrap_err();
    let expected = format!(
        "{}: written by another recipe: `ema.momentum` was 0.99, is absent; images of `data` was 3000 images, abc, is 3001 images, abc; \
         `schedule.lr` was 0.3, is 0.2",
        folder.path().display()
    );
    assert_eq!(error.to_string(), expected);
    assert!(error.hint().contains("--run-dir DIR") && error.hint().contains("--resume never"));

    std::fs::write(folder.path().join("plan.toml"), "not = = toml").unwrap();
    assert!(matches!(first.continues(folder.path()), Err(FolderError::Unreadable { .. })));
}

#[test]
fn guards_have_a_code_a_reason_and_advice() {
    let codes = |images, overrides: &[&str]| -> Vec<&str> {
        plan(images, overrides).unwrap().warnings.iter().map(|warning| warning.code).collect()
    };
    assert_eq!(codes(3000, &[]), ["W001"]);
    assert_eq!(codes(300, &[]), ["W001", "W002", "W003"]);
    assert!(codes(2_000_000, &[]).is_empty());
    let crowded = Plan::new(recipe(&[]), facts(2_000_000), None, &request(Ranks::Count(3))).unwrap();
    assert!(crowded.warnings[0].to_string().starts_with("warning[W004]: 3 ranks on 2 cores"));
    let warning = plan(3000, &[]).unwrap().warnings[0].to_string();
    assert!(warning.starts_with("warning[W001]: 3000 images, fewer than 1000000: "), "{warning}");
    assert!(warning.contains("\n    autodidact checkpoint inspect FILE "), "{warning}");
    let go_on =
        "\n  with a run of this backbone on similar images, go on from its weights: `init=runs/NAME` behind the recipe";
    assert!(warning.ends_with(&format!("# continues from it on these images{go_on}")), "{warning}");
    let text = RECIPE.replace("simclr", "byol");
    let overrides = ["data.source=folder", "data.path=my images"].map(str::to_owned);
    let other = parse(Path::new("a.toml"), &text, &overrides).unwrap().recipe;
    let warning = Plan::new(other, facts(3000), None, &request(Ranks::Auto)).unwrap().warnings[0].to_string();
    let command = "\n    autodidact pretrain recipes/simclr.toml data.source=folder \"data.path=my images\"";
    assert!(warning.ends_with(&format!("{command}{go_on}")), "{warning}");
    // enough images for methods that take long
    let other = parse(Path::new("a.toml"), &text, &[]).unwrap().recipe;
    let warning = Plan::new(other, facts(200_000), None, &request(Ranks::Auto)).unwrap().warnings[0].to_string();
    assert!(warning.starts_with("warning[W001]: 200000") && !warning.contains("recipes/simclr.toml"), "{warning}");
}

#[test]
fn what_a_recipe_leaves_open_follows_from_the_data_and_is_told() {
    let text = RECIPE.replace("simclr", "dino");
    let recipe =
        parse(Path::new("a.toml"), &text, &["method.dino.momentum={start=0.9, end=1}".to_owned()]).unwrap().recipe;
    let first = Plan::new(recipe, facts(3000), None, &request(Ranks::Auto)).unwrap();
    let shown = first.to_string();
    for expected in [
        "note           `method.dino.prototypes`: 1024, 65536 as published (3000 images)\n",
        "note           `method.dino.teacher_temperature`: 0.02, from 0.04 to 0.07 as published (3000 images)\n",
        "note           `method.dino.freeze_steps`: 11 of 110 steps (3000 images)\n",
    ] {
        assert!(shown.contains(expected), "{expected}{shown}");
    }
    assert!(!shown.contains("`method.dino.momentum`"), "{shown}");
    // the plan is a recipe that leaves nothing open, of the same digest
    let again = parse(Path::new("plan.toml"), &first.to_toml().unwrap(), &[]).unwrap().recipe;
    let again = Plan::new(again, facts(3000), None, &request(Ranks::Auto)).unwrap();
    assert_eq!((again.digest(), again.notes.len(), first.notes.len()), (first.digest(), 0, 3));
}

#[test]
fn settings_without_effect_are_told() {
    let notes = |text: &str, overrides: &[&str], start: Option<Start>| {
        let overrides: Vec<String> = overrides.iter().map(|&change| change.to_owned()).collect();
        let recipe = parse(Path::new("a.toml"), text, &overrides).unwrap().recipe;
        Plan::new(recipe, facts(3000), start, &request(Ranks::Auto)).unwrap().notes
    };
    let swav = RECIPE.replace("simclr", "swav");
    let unused = notes(&swav, &["method.swav.queue=64", "method.swav.queue_start_epoch=10"], None);
    let expected = "`method.swav.queue_start_epoch` is 10 and the run has 10 epochs: its queue is never used";
    assert_eq!(unused, [expected]);
    assert_eq!(notes(&swav, &["method.swav.queue=64", "method.swav.queue_start_epoch=9"], None), [""; 0]);
    let zeros = ["backbone.resnet.zero_init_residual=true"];
    assert_eq!(notes(RECIPE, &zeros, None), [""; 0]);
    let started = notes(RECIPE, &zeros, Some(Start::new(std::collections::BTreeMap::new())));
    assert!(started.len() == 2 && started[0].contains("has no effect: `init` brings"), "{started:?}");
    // advice for training that continues
    assert!(
        started[1].contains("the peak rate is 0.3: if that is the rate from scratch, try 0.03 to 0.1"),
        "{started:?}"
    );
    assert!(!started[1].contains("warm up for"), "the recipe does");
    let abrupt = ["schedule.warmup_epochs=0", "schedule.decay=constant"];
    let start = Start::new(std::collections::BTreeMap::new()).with_notes(vec!["it is adapted".to_owned()]);
    let started = notes(RECIPE, &abrupt, Some(start));
    assert_eq!(started[0], "it is adapted");
    assert!(
        started[1].contains("warm up for an epoch") && started[1].contains("`schedule.decay=cosine`"),
        "{started:?}"
    );
}

#[test]
fn the_table_is_aligned_and_complete() {
    let shown = plan(3000, &[]).unwrap().to_string();
    for expected in [
        "images         3000 (embedded sample, 10 classes)\n",
        "views          2 of 32 px\n",
        "backbone       resnet: depth 18, stem imagenet, width 1.0, zero_init_residual false\n",
        "init           random\n",
        "batch          256 = 8 micro-batches of 32\n",
        "steps          110 (11 an epoch, 184 images left out each epoch)\n",
        "warm-up        11 steps (1 epoch)\n",
        "learning rate  0.3 (0.3 x 256 / 256, linear scaling), cosine to 0\n",
        "weight decay   0\n",
        "clipping       none\n",
        "ranks          2 (4 micro-batches each)\n",
    ] {
        assert!(shown.contains(expected), "{expected}{shown}");
    }
}

#[test]
fn schedules_are_resolved_and_told() {
    let changes = [
        "schedule.lr_scaling=linear",
        "batch.global=512",
        "schedule.warmup_lr=0.1",
        "schedule.min_lr=0.05",
        "schedule.decay=linear",
        "schedule.each=epoch",
        "optimizer.sgd.weight_decay=0.04",
        "schedule.weight_decay_end=0.4",
        "schedule.clip_each_norm=3",
    ];
    let plan = plan(3000, &changes).unwrap();
    let shown = plan.to_string();
    for expected in [
        "warm-up        5 steps (1 epoch), from 0.2\n",
        "learning rate  0.6 (0.3 x 512 / 256, linear scaling), straight to 0.1, moving between epochs\n",
        "weight decay   0.04, cosine to 0.4\n",
        "clipping       each parameter's gradient to norm 3\n",
    ] {
        assert!(shown.contains(expected), "{expected}{shown}");
    }
    let schedule = plan.schedule();
    assert_eq!([0, 4, 5, 9].map(|step| schedule.lr_at(step)), [0.2, 0.2, 0.6, 0.6]);
    assert!((schedule.lr_at(49) - (0.6 - 0.5 * 8.0 / 9.0)).abs() < 1e-12);
    let decays = [0, 25, 50].map(|step| plan.weight_decay.at(step));
    assert!(decays.iter().zip([0.04, 0.22, 0.4]).all(|(got, expected)| (got - expected).abs() < 1e-12), "{decays:?}");
}
