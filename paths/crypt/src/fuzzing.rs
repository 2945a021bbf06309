//! What a fuzz target calls.

/// Plays a far end that says these bytes to the client that a volume behind an NBD URI uses.
///
/// # Panics
/// If a request was told what the far end did not say to it, or something was lost.
pub fn check_far_end(bytes: &[u8]) {
    crate::serve::check_far_end(bytes);
}
