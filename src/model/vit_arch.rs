//! Structure of a vision transformer, and what must fit together.

use super::block::LinearInit;
use super::config::{MlpKind, Pool, PositionEmbedding, VitConfig, VitInit};
use super::error::ConfigError;
use super::position::Bicubic;

/// Structure of a vision transformer.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "independent options, as timm has them")]
pub struct VitArch {
    /// Height and width of the images that the position embedding is made for.
    pub image: [usize; 2],
    /// Patch side.
    pub patch: usize,
    /// Channels of the images.
    pub channels: usize,
    /// Width of the tokens.
    pub dim: usize,
    /// Blocks.
    pub depth: usize,
    /// Attention heads.
    pub heads: usize,
    /// Outputs of the first layer of the MLP, both halves of a gated one.
    pub hidden: usize,
    /// Kind of the MLP.
    pub mlp: MlpKind,
    /// Class token.
    pub class_token: bool,
    /// Register tokens.
    pub registers: usize,
    /// Class and register tokens have positions too (timm: not `no_embed_class`).
    pub prefix_positions: bool,
    /// Biases of the qkv projections.
    pub qkv_bias: bool,
    /// Biases of the keys among them.
    pub key_bias: bool,
    /// Layer norm of queries and keys.
    pub qk_norm: bool,
    /// Initial LayerScale.
    pub layer_scale: Option<f64>,
    /// Stochastic depth rate of the last block.
    pub drop_path: f64,
    /// Norm before the blocks, and no bias in the patch projection (timm: `pre_norm`).
    pub pre_norm: bool,
    /// What stands for the image.
    pub pool: Pool,
    /// The final norm comes after pooling instead of before (timm: `fc_norm`).
    pub fc_norm: bool,
    /// Outputs of the classifier `head`; 0: no classifier.
    pub num_classes: usize,
    /// Position embedding.
    pub position: PositionEmbedding,
    /// Base of the periods of rotary positions.
    pub rope_base: f64,
    /// Resizing of the position embedding for images of another size.
    pub resize: Bicubic,
    /// How weights are drawn.
    pub init: VitInit,
    /// Epsilon of the layer norms.
    pub eps: f64,
}

impl VitArch {
    /// Resolves a recipe's table for square images.
    ///
    /// Mean pooling averages tokens that went through the final norm (timm's `fc_norm=False`), because masked modelling needs
    /// that norm on the tokens; `fc_norm` moves it behind the pooling. Registers have no positions unless asked for, as in every timm
    /// model that has registers. A gated MLP has two thirds of the hidden width in each half, rounded up to a multiple of 8
    /// (`DINOv2`, `DINOv3`), and so as many weights as one without gate.
    ///
    /// # Errors
    /// When the sizes do not fit together.
    pub fn from_config(config: &VitConfig, image_size: u32) -> Result<Self, ConfigError> {
        let (dim, depth, heads) = config.sizes();
        let side = image_size as usize;
        let hidden = (dim as f64 * config.mlp_ratio) as usize;
        let arch = Self {
            image: [side, side],
            patch: config.patch,
            channels: 3,
            dim,
            depth,
            heads,
            hidden: if config.mlp.is_gated() { 2 * (hidden * 2 / 3).next_multiple_of(8) } else { hidden },
            mlp: config.mlp,
            class_token: config.class_token,
            registers: config.registers,
            prefix_positions: config.has_prefix_positions(),
            qkv_bias: config.qkv_bias,
            key_bias: config.key_bias,
            qk_norm: config.qk_norm,
            layer_scale: config.layer_scale,
            drop_path: config.drop_path,
            pre_norm: config.pre_norm,
            pool: config.pool,
            fc_norm: config.fc_norm,
            num_classes: 0,
            position: config.position,
            rope_base: config.rope_base,
            resize: config.resize_positions,
            init: config.init,
            eps: config.norm_eps,
        };
        arch.check()?;
        Ok(arch)
    }

    /// Checks that the sizes fit together.
    ///
    /// # Errors
    /// Names the key of the `[backbone.vit]` table that does not fit.
    pub fn check(&self) -> Result<(), ConfigError> {
        let Self { image: [height, width], patch, dim, depth, heads, .. } = *self;
        let fail = |key: &str, problem: String, hint: String| {
            Err(ConfigError::new(&format!("backbone.vit.{key}"), problem, hint))
        };
        for (key, value) in [("patch", patch), ("dim", dim), ("depth", depth), ("heads", heads)] {
            if value == 0 {
                return fail(key, "0 is too small".to_owned(), "set it to 1 or more".to_owned());
            }
        }
        for side in [height, width] {
            if side == 0 || !side.is_multiple_of(patch) {
                let fitting: Vec<_> =
                    (2..=32).filter(|p| side > 0 && side.is_multiple_of(*p)).map(|p| p.to_string()).collect();
                return fail(
                    "patch",
                    format!("images of {side} px are not a whole number of patches of {patch} px"),
                    if fitting.is_empty() {
                        format!("choose an image size that is a multiple of {patch}")
                    } else {
                        format!(
                            "choose an image size that is a multiple of {patch}, or a patch of {}",
                            fitting.join(", ")
                        )
                    },
                );
            }
        }
        if !dim.is_multiple_of(heads) {
            return fail(
                "heads",
                format!("a width of {dim} does not divide into {heads} heads"),
                format!("use a `dim` that is a multiple of {heads}, such as {}", dim.next_multiple_of(heads)),
            );
        }
        if self.position == PositionEmbedding::Sincos && !dim.is_multiple_of(4) {
            return fail(
                "position",
                format!("a sine-cosine embedding needs a width divisible by 4, `dim` is {dim}"),
                format!("set `dim` to {}, or `position` to \"learned\"", dim.next_multiple_of(4)),
            );
        }
        if self.position == PositionEmbedding::Rope && !(dim / heads).is_multiple_of(4) {
            return fail(
                "position",
                format!(
                    "rotary positions need heads whose width is divisible by 4, {dim} / {heads} is {}",
                    dim / heads
                ),
                format!("set `dim` to {}, or `position` to \"learned\"", dim.next_multiple_of(4 * heads)),
            );
        }
        if self.hidden == 0 || (self.mlp.is_gated() && !self.hidden.is_multiple_of(2)) {
            return fail(
                "mlp_ratio",
                format!("the MLP would have {} hidden channels", self.hidden),
                "4 is usual".to_owned(),
            );
        }
        if !(0.0..1.0).contains(&self.drop_path) {
            return fail(
                "drop_path",
                format!("{} is no probability below 1", self.drop_path),
                "0.1 is usual for fine-tuning, 0 for pretraining".to_owned(),
            );
        }
        if self.pool == Pool::Class && !self.class_token {
            return fail(
                "pool",
                "there is no class token to stand for the image".to_owned(),
                "set `pool` to \"mean\", or `class_token` to true".to_owned(),
            );
        }
        Ok(())
    }

    /// Rows and columns of patches.
    #[must_use]
    pub fn grid(&self) -> [usize; 2] {
        self.image.map(|side| side / self.patch)
    }

    /// Class and register tokens.
    #[must_use]
    pub fn num_prefix(&self) -> usize {
        usize::from(self.class_token) + self.registers
    }

    pub(super) fn linear_init(&self) -> LinearInit {
        match self.init {
            VitInit::Normal => LinearInit::TruncatedNormal(0.02),
            VitInit::Xavier => LinearInit::Xavier,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> VitConfig {
        toml::from_str("patch = 8").unwrap()
    }

    #[test]
    fn errors_name_the_key_the_value_and_the_fix() {
        let fail = |config: VitConfig, size| VitArch::from_config(&config, size).unwrap_err().to_string();
        assert_eq!(
            fail(VitConfig { patch: 16, ..config() }, 100),
            "`backbone.vit.patch`: images of 100 px are not a whole number of patches of 16 px\n\
             hint: choose an image size that is a multiple of 16, or a patch of 2, 4, 5, 10, 20, 25"
        );
        assert_eq!(
            fail(VitConfig { dim: Some(100), heads: Some(3), ..config() }, 32),
            "`backbone.vit.heads`: a width of 100 does not divide into 3 heads\n\
             hint: use a `dim` that is a multiple of 3, such as 102"
        );
        assert!(fail(VitConfig { class_token: false, ..config() }, 32).contains("`backbone.vit.pool`"));
        assert!(fail(VitConfig { drop_path: 1.0, ..config() }, 32).contains("`backbone.vit.drop_path`"));
        assert!(fail(VitConfig { depth: Some(0), ..config() }, 32).contains("`backbone.vit.depth`"));
        let sincos = VitConfig { dim: Some(6), heads: Some(2), position: PositionEmbedding::Sincos, ..config() };
        assert!(fail(sincos, 32).contains("set `dim` to 8"));
        let rope = VitConfig { dim: Some(12), heads: Some(2), position: PositionEmbedding::Rope, ..config() };
        assert!(fail(rope, 32).contains("set `dim` to 16, or `position` to"));
    }

    #[test]
    fn a_gated_mlp_has_two_thirds_of_the_width() {
        let hidden = |text: &str| {
            let config = toml::from_str(&format!("patch = 8\nmlp = \"swiglu\"\n{text}")).unwrap();
            VitArch::from_config(&config, 32).unwrap().hidden
        };
        assert_eq!(hidden("dim = 1536\nheads = 24"), 2 * 4096, "DINOv2 giant");
        assert_eq!(hidden("dim = 384\nmlp_ratio = 6"), 2 * 1536, "DINOv3 small plus");
        assert_eq!(hidden("dim = 32\nheads = 4\nmlp_ratio = 1.1"), 2 * 24);
    }
}
