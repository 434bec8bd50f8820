//! Which layers are put in place: all of them.
//!
//! Only a build for tests, with the feature `ablation`, can leave one out, so that tests
//! can show what that layer alone stops. In every other build `has` and `has_step` are constant.

#[cfg(feature = "ablation")]
use std::{borrow::Cow, sync::Arc};

use stockade_policy::plan::Plan;
pub(crate) use stockade_protocol::layer::Layer;
use stockade_protocol::step::Step;

/// The layers of this build.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Layers {
    #[cfg(feature = "ablation")]
    missing: Option<Layer>,
}

#[cfg(not(feature = "ablation"))]
impl Layers {
    /// All of them.
    pub(crate) const fn in_this_build() -> Self {
        Layers {}
    }

    /// Whether a layer is put in place.
    pub(crate) const fn has(self, _layer: Layer) -> bool {
        true
    }

    /// Whether a step is done.
    pub(crate) const fn has_step(self, _step: Step) -> bool {
        true
    }

    /// The plan as it is.
    pub(crate) const fn applied_to(self, plan: &Plan) -> &Plan {
        plan
    }
}

#[cfg(feature = "ablation")]
impl Layers {
    /// All but the one that the variable names.
    pub(crate) fn in_this_build() -> Self {
        let name = std::env::var("STOCKADE_WITHOUT").unwrap_or_default();
        let missing = Layer::ALL.iter().copied().find(|layer| layer.name() == name);
        assert!(missing.is_some() || name.is_empty(), "STOCKADE_WITHOUT: there is no layer {name}");
        Layers { missing }
    }

    /// Whether a layer is put in place.
    pub(crate) fn has(self, layer: Layer) -> bool {
        self.missing != Some(layer)
    }

    /// Whether a step is done: all but those that are the layer and nothing else.
    pub(crate) fn has_step(self, step: Step) -> bool {
        let layer = match step {
            Step::NetworkNamespace | Step::Loopback => Layer::NetworkNamespace,
            Step::Keyring => Layer::SessionKeyring,
            Step::Hostname => Layer::UtsNamespace,
            Step::SealRoot => Layer::ReadOnlyRoot,
            Step::NamespaceLimits => Layer::NamespaceCounts,
            Step::InnerUserNamespace => Layer::InnerUserNamespace,
            Step::CgroupNamespace => Layer::CgroupNamespace,
            Step::Capabilities => Layer::Capabilities,
            Step::NoNewPrivs => Layer::NoNewPrivs,
            _ => return true,
        };
        self.has(layer)
    }

    /// For the executor, which else would refuse to go on.
    pub(crate) fn number(self) -> u32 {
        self.missing.map_or(0, |layer| layer as u32 + 1)
    }

    /// The plan without what makes up the layer that is left out.
    pub(crate) fn applied_to(self, plan: &Plan) -> Cow<'_, Plan> {
        use stockade_policy::plan::{CgroupPlan, LandlockPlan, RootEntry, UserNamespaces};
        use stockade_protocol::LimitKey;
        const RETURN_ALLOW: u64 = 0x06 | 0x7fff_0000 << 32;
        let Some(layer) = self.missing else { return Cow::Borrowed(plan) };
        let mut plan = plan.clone();
        match layer {
            Layer::UserNamespaces => {
                plan.identity.user_namespaces = UserNamespaces::Missing;
                plan.identity.inside = plan.identity.outside;
            }
            Layer::ProcMasks => {
                plan.root.retain(|entry| !matches!(entry, RootEntry::Mask { .. }));
            }
            Layer::TmpfsSizes => {
                plan.root_size = None;
                if !plan.scratch.host {
                    (plan.scratch.size, plan.scratch.files) = (None, None);
                }
            }
            Layer::ScratchCount if plan.scratch.host => (plan.scratch.size, plan.scratch.files) = (None, None),
            Layer::ScratchRules => {
                plan.scratch.protected.clear();
                plan.writable_trees.iter_mut().for_each(|tree| tree.protected.clear());
            }
            Layer::Seccomp => plan.filter.program = Arc::new([RETURN_ALLOW]),
            Layer::Landlock => plan.landlock = LandlockPlan::default(),
            Layer::PayloadLandlock => plan.payload_landlock = LandlockPlan::default(),
            Layer::CgroupLimits => match &mut plan.cgroup {
                CgroupPlan::V1 { settings, .. } | CgroupPlan::V2 { settings, .. } => settings.clear(),
                CgroupPlan::Absent { .. } => {}
            },
            Layer::ResourceLimits => plan.rlimits.clear(),
            Layer::WallClock => plan.limits.set(LimitKey::Wall, None),
            Layer::OutputCaps => plan.limits.set(LimitKey::OutputSize, None),
            // These are steps and no values of the plan.
            Layer::ScratchCount
            | Layer::InnerUserNamespace
            | Layer::NamespaceCounts
            | Layer::DetachedRoot
            | Layer::ReadOnlyRoot
            | Layer::ReadOnlyProc
            | Layer::ScratchFlags
            | Layer::Idmap
            | Layer::PidNamespace
            | Layer::NetworkNamespace
            | Layer::UtsNamespace
            | Layer::IpcNamespace
            | Layer::CgroupNamespace
            | Layer::SessionKeyring
            | Layer::Capabilities
            | Layer::NoNewPrivs
            // A template's own program has it.
            | Layer::Reseeding => {}
        }
        Cow::Owned(plan)
    }
}
