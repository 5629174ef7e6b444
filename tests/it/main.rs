//! One test binary: every binary links all of burn.

mod golden;
