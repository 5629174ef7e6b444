//! Layer-wise decay of the learning rate: a layer for each parameter, read off its path.

use super::pattern;

/// Whose choice of the layers at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerRule {
    /// Embeddings and every token in layer 0, the final norm with the head (`BEiT`, `DINOv2`); what recipes mean.
    Dinov2,
    /// As that, but register tokens with the head (MAE's `get_layer_id_for_vit`, which knows `cls_token` and `pos_embed`).
    Mae,
    /// As MAE's, but the final norm with the last block (timm's `group_matcher`).
    Timm,
}

/// Where a parameter lies in its network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layer {
    Embedding,
    /// Stage and block within it.
    Block([usize; 2]),
    Norm,
    Head,
}

/// Returns the factor of the learning rate of each path: `decay ^ (L + 1 - layer)` with layer 0 for the embeddings, 1 to L for the blocks
/// from input to output and L + 1, factor 1, for the head; none where no path names a block.
///
/// Blocks are those of a vision transformer (`blocks.3`), a `ResNet` (`layer2.0`) or a `ConvNeXt` (`stages.1.blocks.0`, with
/// `stages.1.downsample` a layer of its own as in timm).
/// `BEiT` (Bao et al., 2021, <https://arxiv.org/abs/2106.08254>, released `optim_factory.py`).
#[must_use]
pub fn layer_scales(paths: &[&str], decay: f64, rule: LayerRule) -> Option<Vec<(usize, f64)>> {
    let stem = resnet_stem(paths);
    let is_stem = |path: &str| stem.as_ref().is_some_and(|stem| stem.iter().any(|start| path.starts_with(start)));
    let layers: Vec<Layer> =
        paths.iter().map(|path| if is_stem(path) { Layer::Embedding } else { layer(path, rule) }).collect();
    let mut blocks: Vec<[usize; 2]> =
        layers.iter().filter_map(|layer| if let Layer::Block(at) = layer { Some(*at) } else { None }).collect();
    blocks.sort_unstable();
    blocks.dedup();
    let count = blocks.len();
    let index = |layer: &Layer| match layer {
        Layer::Embedding => 0,
        Layer::Block(at) => 1 + blocks.iter().position(|block| block == at).unwrap_or_default(),
        Layer::Norm if rule == LayerRule::Timm => count,
        Layer::Norm | Layer::Head => count + 1,
    };
    let scale = |layer: usize| (layer, decay.powf((count + 1 - layer) as f64));
    (count > 0).then(|| layers.iter().map(|layer| scale(index(layer))).collect())
}

/// The beginnings of the stem's paths beside the first block of a `ResNet`.
fn resnet_stem(paths: &[&str]) -> Option<[String; 2]> {
    let first = paths.iter().find(|path| path.starts_with("layer1.") || path.contains(".layer1."))?;
    let network = first.split_once("layer1.").map_or("", |(network, _)| network);
    Some(["conv1.", "bn1."].map(|name| format!("{network}{name}")))
}

fn layer(path: &str, rule: LayerRule) -> Layer {
    let parts: Vec<&str> = path.split('.').collect();
    let number = |at: usize| parts.get(at).and_then(|part| part.parse::<usize>().ok());
    for (at, part) in parts.iter().enumerate() {
        let stage = match *part {
            "blocks" => number(at + 1).map(|block| [0, block]),
            "stages" => number(at + 1).and_then(|stage| match parts.get(at + 2) {
                Some(&"blocks") => number(at + 3).map(|block| [stage, block + 1]),
                Some(&"downsample") => Some([stage, 0]),
                _ => None,
            }),
            _ => part
                .strip_prefix("layer")
                .and_then(|stage| stage.parse().ok())
                .and_then(|stage| number(at + 1).map(|block| [stage, block])),
        };
        if let Some(stage) = stage {
            return Layer::Block(stage);
        }
    }
    let embeddings = "*cls_token|*pos_embed|*patch_embed.*|*mask_token|*rel_pos_bias.*|stem.*|*.stem.*";
    let registers = "*reg_token|*register_tokens|*dist_token";
    if pattern::matches(embeddings, path) || (rule == LayerRule::Dinov2 && pattern::matches(registers, path)) {
        Layer::Embedding
    } else if parts.contains(&"norm") {
        Layer::Norm
    } else {
        Layer::Head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scales(paths: &[&str]) -> Vec<f64> {
        layer_scales(paths, 0.5, LayerRule::Dinov2).unwrap().into_iter().map(|(_, scale)| scale).collect()
    }

    #[test]
    fn a_transformer_has_a_layer_a_block() {
        let paths = ["b.cls_token", "b.reg_token", "b.patch_embed.proj.weight", "b.blocks.0.norm1.weight"];
        let more = ["b.blocks.1.mlp.fc1.bias", "b.norm.weight", "head.weight"];
        let paths: Vec<&str> = paths.into_iter().chain(more).collect();
        assert_eq!(scales(&paths), [0.125, 0.125, 0.125, 0.25, 0.5, 1.0, 1.0]);
        let layers =
            |rule| layer_scales(&paths, 0.5, rule).unwrap().into_iter().map(|(layer, _)| layer).collect::<Vec<_>>();
        assert_eq!(layers(LayerRule::Mae), [0, 3, 0, 1, 2, 3, 3]);
        assert_eq!(layers(LayerRule::Timm), [0, 3, 0, 1, 2, 2, 3]);
    }

    #[test]
    fn convolutional_networks_have_a_layer_a_block_over_their_stages() {
        let resnet = [
            "conv1.weight",
            "bn1.bias",
            "layer1.0.conv1.weight",
            "layer1.1.bn1.bias",
            "layer2.0.downsample.0.weight",
            "head.bn1.bias",
        ];
        assert_eq!(scales(&resnet), [0.0625, 0.0625, 0.125, 0.25, 0.5, 1.0]);
        let convnext = [
            "stem.0.weight",
            "stages.0.blocks.0.gamma",
            "stages.1.downsample.1.weight",
            "stages.1.blocks.0.gamma",
            "stages.1.blocks.10.gamma",
            "head.norm.weight",
        ];
        assert_eq!(scales(&convnext), [0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0]);
    }

    #[test]
    fn without_blocks_there_are_no_layers() {
        assert_eq!(layer_scales(&["fc1.weight", "blocks.weight"], 0.5, LayerRule::Dinov2), None);
    }
}
