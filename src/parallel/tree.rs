//! The canonical reduction: one binary tree over the micro-batch index, the same for every number of ranks.
//!
//! Level 0 of the tree are the `S` micro-batches. Node `(level, index)` is the sum `lower + upper` of the nodes `(level - 1, 2 index)` and
//! `(level - 1, 2 index + 1)`; where `S` is no power of two and the upper one would lie beyond the end, the node *is* its lower one.
//! Floating-point addition is not associative, so this order defines the result.
//!
//! A rank owns a contiguous run of micro-batches and adds up as much of the tree as lies inside it; what it holds then are the maximal complete
//! nodes of its run, at most `2 log2 S` of them. Ranks exchange those nodes and finish the same tree, so any rank count up to `S` gives the same
//! bits. While pushing in order, at most `log2 S` partial sums are alive (a binary counter).

/// A complete node of the tree.
#[derive(Clone, Debug, PartialEq)]
pub struct Node<T> {
    /// Height above the micro-batches.
    pub level: u32,
    /// Position at that height.
    pub index: usize,
    /// Sum of everything below.
    pub values: T,
}

/// What can be added up: a number, or a list of such things, element by element.
pub trait Summand {
    /// Adds `other` in place.
    ///
    /// # Panics
    /// If lists differ in length.
    fn add(&mut self, other: &Self);
}

impl Summand for f32 {
    #[inline]
    fn add(&mut self, other: &Self) {
        *self += other;
    }
}

impl Summand for f64 {
    #[inline]
    fn add(&mut self, other: &Self) {
        *self += other;
    }
}

impl<T: Summand> Summand for Vec<T> {
    fn add(&mut self, other: &Self) {
        assert_eq!(self.len(), other.len(), "nodes of one tree have one length");
        self.iter_mut().zip(other).for_each(|(a, b)| a.add(b));
    }
}

/// A sum under way.
#[derive(Debug)]
pub struct TreeSum<T> {
    leaves: usize,
    nodes: Vec<Node<T>>,
}

impl<T: Summand> TreeSum<T> {
    /// Starts a sum over `leaves` micro-batches.
    ///
    /// # Panics
    /// When `leaves` is zero.
    #[must_use]
    pub fn new(leaves: usize) -> Self {
        assert!(leaves > 0, "a tree has at least one leaf");
        Self { leaves, nodes: Vec::new() }
    }

    /// Adds the values of one micro-batch.
    pub fn push_leaf(&mut self, index: usize, values: T) {
        self.push(Node { level: 0, index, values });
    }

    /// Adds a complete node, merging it with its sibling as long as that is there.
    ///
    /// # Panics
    /// When the node lies outside the tree or its length differs from its sibling's.
    pub fn push(&mut self, mut node: Node<T>) {
        assert!(node.index << node.level < self.leaves, "node outside the tree");
        while node.level < self.height() {
            let sibling = node.index ^ 1;
            if sibling << node.level < self.leaves {
                let found = self.nodes.iter().position(|other| other.level == node.level && other.index == sibling);
                let Some(position) = found else { break };
                let other = self.nodes.swap_remove(position);
                let (mut lower, upper) = if other.index < node.index { (other, node) } else { (node, other) };
                lower.values.add(&upper.values);
                node = lower;
            }
            node.index /= 2;
            node.level += 1;
        }
        self.nodes.push(node);
    }

    /// Returns the complete nodes held so far, to be sent to another rank.
    #[must_use]
    pub fn into_nodes(self) -> Vec<Node<T>> {
        self.nodes
    }

    /// Returns the total.
    ///
    /// # Panics
    /// When micro-batches are missing.
    #[must_use]
    pub fn finish(mut self) -> T {
        let root = self.nodes.pop().filter(|root| self.nodes.is_empty() && root.level == self.height());
        root.expect("every micro-batch was pushed once").values
    }

    /// Height of the root: `ceil(log2 leaves)`.
    fn height(&self) -> u32 {
        self.leaves.next_power_of_two().trailing_zeros()
    }
}

/// The additions by which nodes at given places become as few as the tree allows: pairs of positions in the list, the second to be added to the first
/// one after another, and the positions that are left with their places, by level and index.
pub(super) fn merges(leaves: usize, places: &[(u32, usize)]) -> (Vec<(usize, usize)>, Vec<Node<usize>>) {
    /// Adding only writes down what is added.
    struct Slot {
        at: usize,
        additions: Vec<(usize, usize)>,
    }

    impl Summand for Slot {
        fn add(&mut self, other: &Self) {
            self.additions.extend(&other.additions);
            self.additions.push((self.at, other.at));
        }
    }

    let mut sum = TreeSum::new(leaves);
    for (at, &(level, index)) in places.iter().enumerate() {
        sum.push(Node { level, index, values: Slot { at, additions: Vec::new() } });
    }
    let mut nodes = sum.into_nodes();
    nodes.sort_by_key(|node| (node.level, node.index));
    let additions = nodes.iter().flat_map(|node| node.values.additions.iter().copied()).collect();
    let left = nodes.into_iter().map(|Node { level, index, values }| Node { level, index, values: values.at });
    (additions, left.collect())
}

/// Returns the contiguous share of `total` items that part `part` of `parts` owns; sizes differ by at most one, larger ones first.
#[must_use]
pub fn share(total: usize, part: usize, parts: usize) -> std::ops::Range<usize> {
    let (size, larger) = (total / parts, total % parts);
    let start = part * size + part.min(larger);
    start..start + size + usize::from(part < larger)
}

/// Cuts a list of tensors of these lengths into one run for each of `parts`, with about the same number of values.
#[must_use]
pub fn share_tensors(lengths: &[usize], parts: usize) -> Vec<std::ops::Range<usize>> {
    let total: usize = lengths.iter().sum();
    let (mut start, mut end, mut values) = (0, 0, 0);
    (1..=parts)
        .map(|part| {
            while end < lengths.len() && (part == parts || values + lengths[end] / 2 < total * part / parts) {
                values += lengths[end];
                end += 1;
            }
            std::mem::replace(&mut start, end)..end
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, recursively.
    fn reference(values: &[f32]) -> f32 {
        if let [value] = values {
            return *value;
        }
        let half = values.len().next_power_of_two() / 2;
        reference(&values[..half]) + reference(&values[half..])
    }

    #[test]
    fn shares_cover_everything_once() {
        for total in 0..20 {
            for parts in 1..8 {
                let all: Vec<usize> = (0..parts).flat_map(|part| share(total, part, parts)).collect();
                assert_eq!(all, (0..total).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn every_tensor_is_in_one_share() {
        for lengths in
            [vec![], vec![5], vec![0, 0], vec![1, 1, 1, 1], vec![100, 1, 1], vec![1, 1, 100], vec![3, 0, 4, 8, 2]]
        {
            for parts in 1..6 {
                let shares = share_tensors(&lengths, parts);
                let all: Vec<usize> = shares.iter().cloned().flatten().collect();
                assert_eq!((shares.len(), all), (parts, (0..lengths.len()).collect()), "{lengths:?}");
            }
        }
        assert_eq!(share_tensors(&[10, 10, 10, 10], 2), [0..2, 2..4]);
    }

    proptest! {
        #[test]
        fn any_number_of_ranks_and_any_order_give_the_bits_of_the_definition(
            values in prop::collection::vec(-1e6f32..1e6, 1..70),
            parts in 1usize..9,
            reversed: bool,
        ) {
            let leaves = values.len();
            let mut total = TreeSum::new(leaves);
            let mut parts: Vec<_> = (0..parts).map(|part| share(leaves, part, parts)).collect();
            if reversed {
                parts.reverse();
            }
            for run in parts {
                let mut local = TreeSum::new(leaves);
                run.for_each(|i| local.push_leaf(i, vec![values[i]]));
                let nodes = local.into_nodes();
                prop_assert!(nodes.len() <= 2 * 7);
                for node in nodes {
                    total.push(node);
                }
            }
            prop_assert_eq!(total.finish()[0].to_bits(), reference(&values).to_bits());
        }
    }

    #[test]
    #[should_panic(expected = "every micro-batch was pushed once")]
    fn a_missing_leaf_is_noticed() {
        let mut sum = TreeSum::new(3);
        sum.push_leaf(0, vec![1.0]);
        sum.push_leaf(2, vec![1.0]);
        let _ = sum.finish();
    }
}
