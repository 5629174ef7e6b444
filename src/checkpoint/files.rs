//! Files that exist whole or not at all, and safetensors.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::model::Tensors;

/// Shape and values of a tensor.
pub(super) type Slice<'a> = (&'a [usize], &'a [f32]);

/// Writes a new file and waits until it is on disk.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Encodes named fp32 tensors.
pub(super) fn encode(tensors: &[(String, Slice<'_>)]) -> io::Result<Vec<u8>> {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(_, (_, values))| values.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
    let views: Result<Vec<_>, _> = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, (shape, _)), bytes)| Ok((name.as_str(), TensorView::new(Dtype::F32, shape.to_vec(), bytes)?)))
        .collect();
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let encoded = views.and_then(|views| safetensors::serialize(views, Some(metadata)));
    encoded.map_err(io::Error::other)
}

/// Decodes fp32 tensors.
pub(super) fn decode(bytes: &[u8]) -> Result<Tensors, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
    let mut tensors = BTreeMap::new();
    let mut views: Vec<_> = file.iter().collect();
    views.sort_by_key(|(name, _)| *name);
    for (name, view) in views {
        if view.dtype() != Dtype::F32 {
            return Err(format!("{name:?} is {:?}, and only F32 is read", view.dtype()));
        }
        let (values, _) = view.data().as_chunks::<4>();
        tensors
            .insert(name.to_owned(), (view.shape().to_vec(), values.iter().map(|&b| f32::from_le_bytes(b)).collect()));
    }
    Ok(tensors)
}
