//! Networks as lists of segments, between which the engine may cut the graph.

use burn::tensor::Tensor;

use super::pass::Pass;

/// What crosses from one segment to the next.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a handful of handles; the tensors lie elsewhere")]
pub enum Boundary {
    /// Images or feature maps, `[batch, channels, h, w]`.
    Map(Tensor<4>),
    /// Tokens, `[batch, tokens, dim]`, and the rows and columns of patches that the image was cut into.
    Tokens(Tensor<3>, [usize; 2]),
    /// What leaves the last segment.
    Features(Features),
}

/// What a backbone says about a batch of images.
#[derive(Clone, Debug)]
pub struct Features {
    /// One vector per image, `[batch, dim]`.
    pub pooled: Tensor<2>,
    /// One vector per patch, `[batch, patches, dim]`, row by row; convolutional networks have none.
    pub patches: Option<Tensor<3>>,
}

/// A network that is a list of segments.
///
/// The forward pass is the fold of [`forward_segment`](Self::forward_segment) over `0..num_segments()`, from the images as
/// [`Boundary::Map`] to [`Boundary::Features`].
pub trait Segmented {
    /// Returns the number of segments.
    fn num_segments(&self) -> usize;

    /// Names a segment for people.
    fn segment_name(&self, index: usize) -> String;

    /// Returns the segment that a parameter belongs to; `path` is relative to this network.
    fn segment_of(&self, path: &str) -> usize;

    /// Runs one segment.
    ///
    /// # Panics
    /// When `x` is not what the segment before returns.
    fn forward_segment(&self, index: usize, x: Boundary, pass: &mut Pass) -> Boundary;

    /// Runs all segments.
    ///
    /// # Shapes
    /// `[batch, channels, h, w]` to [`Features`].
    fn forward_segments(&self, images: Tensor<4>, pass: &mut Pass) -> Features {
        let start = Boundary::Map(images);
        (0..self.num_segments()).fold(start, |x, index| self.forward_segment(index, x, pass)).into_features()
    }
}

impl Boundary {
    /// Returns the map.
    ///
    /// # Panics
    /// When it is something else.
    #[must_use]
    pub fn into_map(self) -> Tensor<4> {
        match self {
            Self::Map(map) => map,
            other => panic!("a map was expected at this segment, got {}", other.name()),
        }
    }

    /// Returns the tokens and the grid of patches.
    ///
    /// # Panics
    /// When it is something else.
    #[must_use]
    pub fn into_tokens(self) -> (Tensor<3>, [usize; 2]) {
        match self {
            Self::Tokens(tokens, grid) => (tokens, grid),
            other => panic!("tokens were expected at this segment, got {}", other.name()),
        }
    }

    /// Returns the features.
    ///
    /// # Panics
    /// When it is something else.
    #[must_use]
    pub fn into_features(self) -> Features {
        match self {
            Self::Features(features) => features,
            other => panic!("features were expected after the last segment, got {}", other.name()),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Map(_) => "a map",
            Self::Tokens(..) => "tokens",
            Self::Features(_) => "features",
        }
    }
}
