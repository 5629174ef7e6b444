//! The weights that a backbone starts from when they are not drawn.

use std::collections::BTreeMap;

use super::lora::is_adapter;
use super::params::{self, Layout};

/// Shape and values of named tensors.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Name of a backbone's field in every method.
const BACKBONE: &str = "backbone.";

/// Tensors of a backbone under their names below it: `conv1.weight`, `blocks.0.norm1.bias`, `bn1.running_mean`.
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    tensors: Tensors,
    from: String,
    origin: String,
    notes: Vec<String>,
    partial: bool,
}

impl Start {
    /// Takes shape and values of each tensor.
    #[must_use]
    pub fn new(tensors: Tensors) -> Self {
        Self { tensors, from: String::new(), origin: String::new(), notes: Vec::new(), partial: false }
    }

    /// Lets tensors of the backbone be missing; they are drawn.
    #[must_use]
    pub fn partial(self, partial: bool) -> Self {
        Self { partial, ..self }
    }

    /// Adds what the user should know about them, a sentence each.
    #[must_use]
    pub fn with_notes(self, notes: Vec<String>) -> Self {
        Self { notes, ..self }
    }

    /// Returns what the user should know about them.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Says what named them.
    #[must_use]
    pub fn from(self, typed: &str) -> Self {
        self.described(typed, typed)
    }

    /// Says what named them, and what they are.
    #[must_use]
    pub fn described(self, typed: &str, origin: &str) -> Self {
        Self { from: typed.to_owned(), origin: origin.to_owned(), ..self }
    }

    /// Returns what named them.
    #[must_use]
    pub fn typed(&self) -> &str {
        &self.from
    }

    /// Returns what they are, in words.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Returns shape and values of each tensor.
    #[must_use]
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Returns the values of the tensor at a module path such as `backbone.conv1.weight`, if they are here and have this shape.
    #[must_use]
    pub fn get(&self, path: &str, shape: &[usize]) -> Option<&[f32]> {
        let (own, values) = self.tensors.get(path.strip_prefix(BACKBONE)?)?;
        (own == shape).then_some(values)
    }

    /// Tells whether these are the tensors of the backbone of a network, no more and, unless they are [partial](Self::partial), no fewer.
    ///
    /// # Errors
    /// With the first difference, in words.
    pub fn fits(&self, network: &Layout) -> Result<(), String> {
        let own = network.entries().iter().filter(|entry| !is_adapter(&entry.path));
        let own = own.filter_map(|entry| Some((entry.path.strip_prefix(BACKBONE)?, &entry.shape)));
        let own: BTreeMap<&str, &Vec<usize>> = own.collect();
        let found = own.keys().filter(|name| self.tensors.contains_key(**name)).count();
        for (name, shape) in &own {
            match self.tensors.get(*name) {
                None if self.partial => {}
                None => {
                    return Err(format!(
                        "it has no `{name}` ({found} of the {} tensors of the backbone are there)",
                        own.len()
                    ));
                }
                Some((there, _)) if there != *shape => {
                    return Err(format!("`{name}` is {there:?} there and {shape:?} in the recipe's backbone"));
                }
                Some((_, values)) => {
                    if let Some(bad) = values.iter().find(|value| !value.is_finite()) {
                        return Err(format!("`{name}` holds {bad}"));
                    }
                    if let Some(bad) = values.iter().find(|value| name.ends_with("running_var") && **value < 0.0) {
                        return Err(format!("`{name}` holds {bad}, no variance"));
                    }
                }
            }
        }
        match self.tensors.keys().find(|name| !own.contains_key(name.as_str())) {
            Some(name) => Err(format!("it has {name:?}, the recipe's backbone has not")),
            None => Ok(()),
        }
    }

    /// Returns the number of tensors and of values.
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        (self.tensors.len(), self.tensors.values().map(|(_, values)| values.len()).sum())
    }

    /// Returns the BLAKE3 hash of names, shapes and values.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut hash = blake3::Hasher::new();
        for (name, (shape, values)) in &self.tensors {
            hash.update(format!("{name} {shape:?}\n").as_bytes());
            params::hash(&mut hash, values);
        }
        hash.finalize().to_hex().to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::tensor::Device;

    use super::*;
    use crate::model::{Backbone, BackboneConfig, Scope};

    /// A backbone where methods have it.
    #[derive(burn::module::Module, Debug)]
    struct Holder {
        backbone: Backbone,
    }

    fn network(scope: &Scope) -> (Backbone, Layout) {
        let config: BackboneConfig = toml::from_str("[resnet]\ndepth = 18\nwidth = 0.0625\nstem = \"cifar\"").unwrap();
        let network = Backbone::new(&config, 32, &scope.enter("backbone")).unwrap();
        let layout = Layout::of(&network);
        (network, layout)
    }

    /// The tensors of a network with another seed, running statistics moved.
    fn tensors() -> Tensors {
        let (network, layout) = network(&Scope::new(1, &Device::flex()));
        let (weights, buffers) = (params::read_weights(&network, &layout), params::read_buffers(&network, &layout));
        let of = |entry: &params::Entry| match entry.kind {
            crate::model::Kind::Trained => weights[entry.range()].to_vec(),
            crate::model::Kind::Buffer => buffers[entry.range()].iter().map(|value| value + 0.5).collect(),
        };
        layout.entries().iter().map(|entry| (entry.path.clone(), (entry.shape.clone(), of(entry)))).collect()
    }

    #[test]
    fn a_network_starts_with_them_and_so_does_its_twin() {
        let given = tensors();
        let scope = Scope::new(2, &Device::flex()).starting_from(Some(Arc::new(Start::new(given.clone()))));
        for scope in [scope.clone(), scope.untrained()] {
            let (network, layout) = network(&scope);
            let mut values = params::read_weights(&network, &layout);
            let mut buffers = params::read_buffers(&network, &layout);
            let trained = layout.num_weights();
            assert!(trained == 0 || trained == values.len());
            values.append(&mut buffers);
            let expected = |entry: &params::Entry| {
                let at = if entry.kind == crate::model::Kind::Trained { 0 } else { trained };
                values[at..][entry.range()] == given[&entry.path].1
            };
            assert!(layout.entries().iter().all(expected));
        }
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let layout = Layout::of(&Holder { backbone: network(&Scope::new(0, &Device::flex())).0 });
        let fits = |change: fn(&mut Tensors)| {
            let mut tensors = tensors();
            change(&mut tensors);
            Start::new(tensors).fits(&layout)
        };
        assert_eq!(fits(|_| ()), Ok(()));
        let missing = fits(|t| drop(t.remove("bn1.running_mean"))).unwrap_err();
        assert!(missing.starts_with("it has no `bn1.running_mean` (99 of the 100 tensors"), "{missing}");
        let wider = fits(|t| t.get_mut("bn1.bias").unwrap().0 = vec![5]).unwrap_err();
        assert_eq!(wider, "`bn1.bias` is [5] there and [4] in the recipe's backbone");
        let more = fits(|t| drop(t.insert("fc.weight".to_owned(), (vec![1], vec![0.0])))).unwrap_err();
        assert_eq!(more, "it has \"fc.weight\", the recipe's backbone has not");
        let mut some = tensors();
        some.remove("bn1.running_mean");
        assert_eq!(Start::new(some).partial(true).fits(&layout), Ok(()), "unless that is allowed");
        let bad = fits(|t| t.get_mut("bn1.bias").unwrap().1[1] = f32::NAN).unwrap_err();
        assert_eq!(bad, "`bn1.bias` holds NaN");
    }

    #[test]
    fn a_digest_is_of_names_shapes_and_values() {
        let one = |name: &str, shape: &[usize], values: &[f32]| {
            Start::new(BTreeMap::from([(name.to_owned(), (shape.to_vec(), values.to_vec()))])).digest()
        };
        let first = one("a", &[2, 1], &[1.0, 2.0]);
        assert_eq!(first, one("a", &[2, 1], &[1.0, 2.0]));
        assert_ne!(first, one("b", &[2, 1], &[1.0, 2.0]));
        assert_ne!(first, one("a", &[1, 2], &[1.0, 2.0]));
        assert_ne!(first, one("a", &[2, 1], &[1.0, 2.5]));
    }
}
