//! Memory for outputs and for work in between.
//!
//! Fresh pages are the slowest memory there is: the kernel zeroes each on first touch, and on virtual machines a fault costs
//! far more than writing the page. Outputs come from the allocator, not zeroed ([`buffer`]); work areas are kept by the thread
//! and used again ([`work_area`]).

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

/// Tells mimalloc, where it is the program's allocator, never to give freed pages back to the system.
///
/// Every step frees and asks for the same memory; by default mimalloc purges what was free for a second, and a step is longer.
#[expect(unsafe_code)]
pub fn keep_pages() {
    /// `mi_option_purge_delay`, the same number in versions 2 and 3; the crate names stable options only.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: sets a number that the allocator reads when it frees; any value is allowed, -1 means never.
    unsafe {
        libmimalloc_sys::mi_option_set(PURGE_DELAY, -1);
    }
}

/// Returns a buffer for `len` values that the caller overwrites, every one, before reading it.
///
/// Zeroing an output costs as much memory traffic as writing it. Tests fill the buffer with NaN, so a value that a kernel
/// forgets shows up.
#[expect(unsafe_code, clippy::uninit_vec)]
pub(super) fn buffer(len: usize) -> Vec<f32> {
    if cfg!(any(test, miri)) {
        return vec![f32::NAN; len];
    }
    let mut values = Vec::with_capacity(len);
    // SAFETY: the capacity is `len`, `f32` has no invalid bit pattern and no destructor, and each caller writes before it
    // reads (the tests' NaN would show otherwise).
    unsafe {
        values.set_len(len);
    }
    values
}

/// Work areas that a thread keeps.
const KEPT: usize = 8;

thread_local! {
    static FREE: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Values that belong to one operation until dropped, and then to the next on this thread.
pub(super) struct WorkArea {
    values: Vec<f32>,
    len: usize,
}

/// Borrows `len` values of any content.
pub(super) fn work_area(len: usize) -> WorkArea {
    let mut values = FREE.with_borrow_mut(|free| {
        // The smallest that is large enough, else the largest, to grow.
        let fits = (0..free.len()).filter(|i| free[*i].len() >= len).min_by_key(|i| free[*i].len());
        let pick = fits.or_else(|| (0..free.len()).max_by_key(|i| free[*i].len()));
        pick.map(|i| free.swap_remove(i)).unwrap_or_default()
    });
    if values.len() < len {
        values = vec![0.0; len]; // nothing of the old content is worth copying
    }
    if cfg!(test) {
        values.fill(f32::NAN);
    }
    WorkArea { values, len }
}

impl Deref for WorkArea {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.values[..self.len]
    }
}

impl DerefMut for WorkArea {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.len]
    }
}

impl Drop for WorkArea {
    fn drop(&mut self) {
        // A thread that is ending has no list any more; then the values are freed.
        let _ = FREE.try_with(|free| {
            let mut free = free.borrow_mut();
            if free.len() < KEPT {
                free.push(std::mem::take(&mut self.values));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_work_area_comes_back() {
        let first = work_area(100).as_ptr();
        let again = work_area(50);
        assert_eq!(again.as_ptr(), first);
        assert_eq!(again.len(), 50);
        let other = work_area(10);
        assert_ne!(other.as_ptr(), first);
        assert_eq!(work_area(0).len(), 0);
    }
}
