//! Round trips and refusals.
