//! The attacks, a file for each class.

mod file_system;

use crate::{attack::Attack, world::World};

/// All of them, as far as they make sense under the policy.
pub(crate) fn all(world: &World) -> Vec<Attack> {
    [file_system::attacks].into_iter().flat_map(|attacks| attacks(world)).collect()
}
