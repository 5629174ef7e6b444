//! A backbone in a file: which, where, and how its tensors become those of a network of ours.

use std::collections::{BTreeMap, BTreeSet};

use super::adapt::{self, Step};
use super::arch::{self, Arch, Hints, Shapes};
use super::checkpoint::Checkpoint;
use super::error::{ImportError, Refusal};
use super::layouts::{CONTAINERS, MARKS, NAMES, Names, PLACES, UNSUPPORTED};
use super::pattern::rename;
use crate::model::position::{Bicubic, sincos_table};
use crate::model::{PositionEmbedding, Tensors};

/// The least share of a backbone's tensors that a file must have, unless asked for otherwise: with fewer, training goes on as if nothing were
/// wrong from weights that are mostly random (open-mmlab/mmselfsup#330).
pub const LEAST_MATCHED: f64 = 0.95;

/// One of our tensors, as it is made from those of the file.
#[derive(Clone, Debug)]
struct Piece {
    /// Names in the file, in the order of their rows; none: zeros.
    parts: Vec<Option<String>>,
    /// Shape of the whole.
    shape: Vec<usize>,
}

/// A backbone that was found in a file.
#[derive(Debug)]
pub struct Found<'a> {
    checkpoint: &'a Checkpoint,
    names: &'static Names,
    prefix: String,
    place: String,
    others: Vec<String>,
    pieces: BTreeMap<String, Piece>,
    outside: Vec<String>,
    unknown: Vec<String>,
    arch: Arch,
    heads_known: bool,
    notes: Vec<String>,
}

/// What becomes of one tensor of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is loaded as it is.
    Loaded,
    /// It is loaded, changed in this way.
    Adapted(String),
    /// The file has none.
    Missing,
    /// The file has one of another shape.
    Differs,
}

impl Fate {
    /// Tells whether the file has it.
    #[must_use]
    pub fn is_matched(&self) -> bool {
        matches!(self, Self::Loaded | Self::Adapted(_))
    }

    /// Returns how it is changed.
    #[must_use]
    pub fn change(&self) -> Option<&str> {
        match self {
            Self::Adapted(how) => Some(how),
            _ => None,
        }
    }
}

/// One tensor of a network, and what the file has for it.
#[derive(Clone, Debug)]
pub struct Row {
    /// Path in our network.
    pub path: String,
    /// Shape there.
    pub shape: Vec<usize>,
    /// Names in the file.
    pub from: Vec<String>,
    /// Shape in the file, its parts put together.
    pub there: Option<Vec<usize>>,
    /// What becomes of it.
    pub fate: Fate,
    step: Option<Step>,
}

/// How a file fits a network.
#[derive(Clone, Debug)]
pub struct Fit {
    /// Every tensor of the network.
    pub rows: Vec<Row>,
    /// Tensors of the file's backbone that the network has not, by their names in the file.
    pub left_over: Vec<String>,
}

impl Fit {
    /// Returns the share of the network's tensors that the file has.
    #[must_use]
    pub fn matched(&self) -> f64 {
        self.num_matched() as f64 / self.rows.len().max(1) as f64
    }

    /// Returns the number of the network's tensors that the file has.
    #[must_use]
    pub fn num_matched(&self) -> usize {
        self.rows.iter().filter(|row| row.fate.is_matched()).count()
    }

    /// Pairs each tensor that is missing with the name left over that is most like it.
    #[must_use]
    pub fn nearest(&self) -> Vec<(&str, &str)> {
        const MOST: usize = 40;
        let missing = self.rows.iter().filter(|row| row.fate == Fate::Missing).take(MOST);
        let near = missing.filter_map(|row| {
            let like = |name: &&String| strsim::normalized_damerau_levenshtein(&row.path, tail(name, &row.path));
            let best = self.left_over.iter().take(400).max_by(|a, b| like(a).total_cmp(&like(b)))?;
            (like(&best) > 0.6).then_some((row.path.as_str(), best.as_str()))
        });
        near.collect()
    }
}

/// The last segments of a name, as many as `path` has.
fn tail<'a>(name: &'a str, path: &str) -> &'a str {
    let segments = path.split('.').count();
    let start = name.rmatch_indices(['.', '/']).nth(segments - 1).map_or(0, |(at, _)| at + 1);
    &name[start..]
}

impl<'a> Found<'a> {
    /// Looks for a backbone.
    ///
    /// # Errors
    /// When there is none that is known, or one whose tensors make no network of ours.
    pub fn find(checkpoint: &'a Checkpoint, hints: &Hints) -> Result<Self, ImportError> {
        find(checkpoint, hints).map_err(|refusal| refusal.at(checkpoint.path()))
    }

    /// Returns the layout, in words.
    #[must_use]
    pub fn layout(&self) -> String {
        let whose = MARKS.iter().find(|(mark, _)| self.checkpoint.tensors().keys().any(|name| name.contains(mark)));
        let named = PLACES.iter().find(|place| place.path == self.place).map(|place| place.name);
        let place = match (named, whose) {
            (Some(name), _) if self.place.is_empty() || name.contains(':') && whose.is_none() => name.to_owned(),
            (Some(name), Some((_, whose))) if name.contains(whose) => name.to_owned(),
            (Some(name), _) => name.to_owned(),
            (None, _) => format!("a wrapper, `{}`", self.prefix),
        };
        match whose {
            Some((_, whose)) if !place.contains(whose) => {
                format!("{} names, {place} (a file of {whose})", self.names.name)
            }
            _ => format!("{} names, {place}", self.names.name),
        }
    }

    /// Returns what comes before the backbone's names in the file.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns where else in the file a backbone lies.
    #[must_use]
    pub fn others(&self) -> &[String] {
        &self.others
    }

    /// Returns its structure.
    #[must_use]
    pub fn arch(&self) -> &Arch {
        &self.arch
    }

    /// Tells whether the number of heads was read rather than assumed.
    #[must_use]
    pub fn heads_known(&self) -> bool {
        self.heads_known
    }

    /// Returns what was assumed, a sentence each.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the names of tensors that are no part of a backbone: heads, decoders, other networks, optimizers.
    #[must_use]
    pub fn outside(&self) -> &[String] {
        &self.outside
    }

    /// Returns the number of values of its own tensors.
    #[must_use]
    pub fn num_values(&self) -> usize {
        self.pieces.values().map(|piece| piece.shape.iter().product::<usize>()).sum()
    }

    /// Compares it with a network.
    #[must_use]
    pub fn fit(&self, arch: &Arch) -> Fit {
        let wanted = arch.tensors();
        let rows = wanted.iter().map(|(path, shape)| {
            let piece = self.pieces.get(path);
            let step = piece.and_then(|piece| adapt::step(path, &piece.shape, shape, &self.arch, arch));
            let fate = match (piece, step) {
                (None, _) => Fate::Missing,
                (Some(_), None) => Fate::Differs,
                (Some(_), Some(Step::Same)) => Fate::Loaded,
                (Some(piece), Some(step)) => {
                    Fate::Adapted(adapt::describe(step, &piece.shape, shape, &self.arch, arch))
                }
            };
            Row {
                path: path.clone(),
                shape: shape.clone(),
                from: piece.map_or_else(Vec::new, |piece| piece.parts.iter().flatten().cloned().collect()),
                there: piece.map(|piece| piece.shape.clone()),
                fate,
                step,
            }
        });
        let extra = self.pieces.iter().filter(|(path, _)| !wanted.contains_key(*path));
        let extra = extra.flat_map(|(_, piece)| piece.parts.iter().flatten().cloned());
        Fit { rows: rows.collect(), left_over: extra.chain(self.unknown.iter().cloned()).collect() }
    }

    /// Reads the tensors of a network.
    ///
    /// # Errors
    /// When the file cannot be read, or holds a value that is not finite or a negative variance.
    pub fn load(&self, arch: &Arch) -> Result<Tensors, ImportError> {
        self.read(arch).map_err(|error| match error {
            Failed::Import(error) => error,
            Failed::Refused(refusal) => refusal.at(self.checkpoint.path()),
        })
    }

    fn read(&self, arch: &Arch) -> Result<Tensors, Failed> {
        let fit = self.fit(arch);
        let mut tensors = Tensors::new();
        let mut in_front = Vec::new();
        for row in &fit.rows {
            let (Some(step), Some(piece)) = (row.step, self.pieces.get(&row.path)) else { continue };
            let values = self.values(&row.path, piece)?;
            let values = match step {
                Step::Same | Step::Reshape => values,
                Step::Stem => {
                    let (&[_, from, rows, columns], &[_, to, to_rows, to_columns]) = (&piece.shape[..], &row.shape[..])
                    else {
                        continue;
                    };
                    let sizes = ([rows, columns], [to_rows, to_columns]);
                    let resampled = adapt::resample_patches(&values, sizes.0, sizes.1, Bicubic::Antialias);
                    let resampled = resampled.ok_or_else(|| {
                        Refusal::new(
                            format!("patches of {rows} x {columns} px cannot be resampled to {to_rows} x {to_columns}"),
                            "use a patch size nearer to that of the file",
                        )
                    })?;
                    adapt::adapt_channels(&resampled, from, to, to_rows * to_columns)
                }
                Step::Positions => {
                    let Some(grids) = adapt::grids(&piece.shape, &self.arch, arch) else { continue };
                    let dim = row.shape.last().copied().unwrap_or(1);
                    let (prefix, table) = values.split_at(grids.prefix_there * dim);
                    let table = adapt::resample_positions(table, grids.old, grids.new, Bicubic::Antialias);
                    let mut rows = vec![0.0; grids.prefix_here * dim];
                    if grids.prefix_here > 0 {
                        rows[..prefix.len()].copy_from_slice(prefix);
                    } else {
                        in_front = prefix.to_vec();
                    }
                    rows.extend(table);
                    rows
                }
            };
            tensors.insert(row.path.clone(), (row.shape.clone(), values));
        }
        // positions of tokens in front that have no place in the network's table: added to the tokens themselves
        for name in ["cls_token", "reg_token"] {
            if let Some((_, token)) = tensors.get_mut(name) {
                let count = in_front.len().min(token.len());
                for (value, position) in token.iter_mut().zip(in_front.drain(..count)) {
                    *value += position;
                }
            }
        }
        Ok(tensors)
    }

    /// Reads one tensor, its parts put together.
    fn values(&self, path: &str, piece: &Piece) -> Result<Vec<f32>, Failed> {
        let whole: usize = piece.shape.iter().product();
        let mut values = Vec::new();
        for part in &piece.parts {
            match part {
                Some(name) if piece.parts.len() == 1 => values = self.checkpoint.read_f32(name)?,
                Some(name) => values.extend(self.checkpoint.read_f32(name)?),
                None => values.resize(values.len() + whole / piece.parts.len(), 0.0),
            }
        }
        let name = piece.parts.iter().flatten().next().map_or(path, String::as_str);
        if let Some(bad) = values.iter().find(|value| !value.is_finite()) {
            return Err(Refusal::new(
                format!("{name:?} holds {bad}"),
                "the training that wrote it had diverged, or the file is damaged; use an earlier checkpoint",
            )
            .into());
        }
        if path.ends_with("running_var")
            && let Some(bad) = values.iter().find(|value| **value < 0.0)
        {
            return Err(Refusal::damaged(format!("{name:?} holds {bad}, which is no variance")).into());
        }
        Ok(values)
    }
}

enum Failed {
    Import(ImportError),
    Refused(Refusal),
}

impl From<ImportError> for Failed {
    fn from(error: ImportError) -> Self {
        Self::Import(error)
    }
}

impl From<Refusal> for Failed {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// What is left of a place in a file without the parts that say nothing.
fn plain_place(prefix: &str) -> String {
    let segments = prefix.split(['.', '/']).filter(|segment| !segment.is_empty() && !CONTAINERS.contains(segment));
    segments.collect::<Vec<_>>().join(".")
}

/// How good a place is: its place in the table; those that are not in it come after the best and before twins.
fn rank(place: &str) -> usize {
    let unknown = PLACES.iter().position(|place| place.path == "teacher_backbone").unwrap_or(PLACES.len());
    match PLACES.iter().position(|known| known.path == place) {
        Some(at) if at < unknown => 2 * at,
        Some(at) => 2 * at + 1,
        None => 2 * unknown,
    }
}

fn find<'a>(checkpoint: &'a Checkpoint, hints: &Hints) -> Result<Found<'a>, Refusal> {
    let tensors = checkpoint.tensors();
    let mut places: Vec<(usize, String, &'static Names, String)> = Vec::new();
    for names in NAMES {
        for name in tensors.keys().filter(|name| name.ends_with(names.anchor)) {
            let prefix = &name[..name.len() - names.anchor.len()];
            let begins = format!("{prefix}{}", names.also);
            let has_also = tensors.range(begins.clone()..).next().is_some_and(|(next, _)| next.starts_with(&begins));
            if has_also && (prefix.is_empty() || prefix.ends_with(['.', '/'])) {
                let place = plain_place(prefix);
                places.push((rank(&place), prefix.to_owned(), names, place));
            }
        }
    }
    places.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    let mut places = places.into_iter();
    let Some((_, prefix, names, place)) = places.next() else { return Err(unsupported(checkpoint)) };
    let others: BTreeSet<String> = places.map(|(_, other, ..)| other).filter(|other| *other != prefix).collect();

    let mut parts: BTreeMap<String, Vec<Option<String>>> = BTreeMap::new();
    let (mut outside, mut masked) = (Vec::new(), false);
    for name in tensors.keys() {
        let Some(rest) = name.strip_prefix(&prefix).filter(|rest| {
            !others.iter().any(|other| name.starts_with(other) && other.starts_with(&prefix) && !rest.is_empty())
        }) else {
            outside.push(name.clone());
            continue;
        };
        let (path, part) = rename(rest, names.renames);
        if let Some((_, what)) = names.unlike.iter().find(|(mark, _)| marked(&path, mark) || marked(rest, mark)) {
            return Err(Refusal::new(format!("it is {what} ({name:?}), which is not supported"), SUPPORTED));
        }
        if names.outside.iter().any(|mark| outside_by(&path, mark)) {
            masked |= path.ends_with(".bias_mask");
            outside.push(name.clone());
            continue;
        }
        let (part, of) = part.unwrap_or((0, 1));
        let slots = parts.entry(path.clone()).or_insert_with(|| vec![None; of]);
        match slots.get_mut(part) {
            Some(slot @ None) => *slot = Some(name.clone()),
            Some(Some(first)) => {
                let text = format!("{first:?} and {name:?} are the same tensor of the backbone, `{path}`");
                return Err(Refusal::new(text, "leave only one of the two networks in the file"));
            }
            None => {
                return Err(Refusal::new(
                    format!("{name:?} is a part of `{path}`, which is there as a whole too"),
                    "leave only one of them in the file",
                ));
            }
        }
    }
    let mut pieces = BTreeMap::new();
    for (path, mut parts) in parts {
        // a gated MLP without its gate is a plain one
        if parts.len() == 2 && parts[0].is_none() {
            parts.remove(0);
        }
        let shape = folded(&path, &parts, checkpoint)?;
        pieces.insert(path, Piece { parts, shape });
    }
    let shapes: Shapes = pieces.iter().map(|(path, piece)| (path.clone(), piece.shape.clone())).collect();
    let partial = |path: &str| masked || pieces.get(path).is_some_and(|piece| piece.parts.contains(&None));
    let inferred = arch::infer(names, &place, &shapes, &partial, checkpoint.config(), hints)?;
    let known = inferred.arch.tensors();
    let (pieces, unknown): (BTreeMap<_, _>, Vec<_>) = {
        let (ours, other): (BTreeMap<_, _>, BTreeMap<_, _>) =
            pieces.into_iter().partition(|(path, _)| known.contains_key(path));
        (ours, other.into_values().flat_map(|piece| piece.parts.into_iter().flatten()).collect())
    };
    let mut found = Found {
        checkpoint,
        names,
        prefix,
        place,
        others: others.into_iter().collect(),
        pieces,
        outside,
        unknown,
        arch: inferred.arch,
        heads_known: inferred.heads_known,
        notes: inferred.notes,
    };
    if found.has_fixed_positions()
        && let Arch::Vit(vit) = &mut found.arch
    {
        vit.position = PositionEmbedding::Sincos;
    }
    Ok(found)
}

impl Found<'_> {
    /// Tells whether its position embedding is MAE's table of sines and cosines.
    fn has_fixed_positions(&self) -> bool {
        let (Arch::Vit(vit), Some(piece)) = (&self.arch, self.pieces.get("pos_embed")) else { return false };
        if vit.position != PositionEmbedding::Learned || !vit.dim.is_multiple_of(4) {
            return false;
        }
        let Ok(values) = self.values("pos_embed", piece) else { return false };
        let table = sincos_table(vit.grid(), vit.dim);
        let (prefix, rest) = values.split_at(values.len().saturating_sub(table.len()));
        prefix.iter().all(|&value| value == 0.0) && rest.iter().zip(&table).all(|(a, b)| (a - b).abs() < 1e-4)
    }
}

const SUPPORTED: &str =
    "vision transformers, residual networks and ConvNeXt are supported; docs/checkpoints.md lists the layouts";

/// Tells whether a key begins so, or (`~`) has such a part.
fn marked(key: &str, mark: &str) -> bool {
    match mark.strip_prefix('~') {
        Some(part) => key.contains(part),
        None => key.starts_with(mark),
    }
}

/// Tells whether a key begins so, or (`~`) ends so.
fn outside_by(key: &str, mark: &str) -> bool {
    match mark.strip_prefix('~') {
        Some(end) => key.ends_with(end),
        None => key.starts_with(mark),
    }
}

/// The shape of a tensor whose parts are put together by rows.
fn folded(path: &str, parts: &[Option<String>], checkpoint: &Checkpoint) -> Result<Vec<usize>, Refusal> {
    let mut shape: Option<Vec<usize>> = None;
    for name in parts.iter().flatten() {
        let part = &checkpoint.tensors()[name];
        if !part.dtype().is_float() {
            let hint = "weights are read as float32, float16, bfloat16 or float64; quantised ones are not";
            return Err(Refusal::new(format!("{name:?} is of type {}", part.dtype().name()), hint));
        }
        match &shape {
            Some(first) if first != part.shape() => {
                return Err(Refusal::damaged(format!("the parts of `{path}` are {first:?} and {:?}", part.shape())));
            }
            _ => shape = Some(part.shape().to_vec()),
        }
    }
    let mut shape = shape.unwrap_or_default();
    if parts.len() > 1 {
        if parts.contains(&None) && !path.ends_with("bias") {
            return Err(Refusal::damaged(format!("a part of `{path}` is missing")));
        }
        match shape.first_mut() {
            Some(rows) => *rows *= parts.len(),
            None => return Err(Refusal::damaged(format!("the parts of `{path}` have no rows"))),
        }
    }
    Ok(shape)
}

/// Says what a file holds that has no backbone of ours.
fn unsupported(checkpoint: &Checkpoint) -> Refusal {
    let names = checkpoint.tensors();
    if names.is_empty() {
        return Refusal::new(
            "it holds no tensors",
            "name a file of weights; settings and optimizers alone are of no use",
        );
    }
    let known = UNSUPPORTED.iter().find(|(end, _)| names.keys().any(|name| name.ends_with(end)));
    if let Some((_, what)) = known {
        return Refusal::new(
            format!("its {} tensors are those of {what}, which is not supported", names.len()),
            SUPPORTED,
        );
    }
    let some: Vec<String> = names.keys().take(3).map(|name| format!("{name:?}")).collect();
    Refusal::new(
        format!("its {} tensors are of no network that is supported: {}, ...", names.len(), some.join(", ")),
        SUPPORTED,
    )
}
