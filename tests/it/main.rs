//! One test binary: every binary links all of burn.

mod architecture;
mod golden;
mod mistakes;
mod recipes;
mod runs;
