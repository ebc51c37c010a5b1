"""Registry of studies."""

from caatnet.config.schema.studies import (
  composed,
  federated,
  networks,
  overlapped,
  plans,
  served,
  workloads,
)

# Studies by config.study and, for serving, config.subject.
STUDIES = {
  "alignment": workloads.Alignment,
  "collectives": networks.Collectives,
  "datacentre": plans.Datacentre,
  "federated": federated.FederatedLinks,
  "flows": networks.Flows,
  "inference": workloads.Inference,
  "partitions": workloads.Partitions,
  "pipeline": networks.Pipeline,
  "placement": plans.Placement,
  "planner": plans.Planner,
  "published": plans.Published,
  "schedule": networks.Schedule,
  "serving.composition": composed.Composition,
  "serving.fastswitch": served.FastSwitch,
  "serving.fairness": served.Fairness,
  "serving.nanobatches": overlapped.NanoBatches,
  "serving.vllm_log": served.VLLMLog,
  "utilisation": workloads.Utilisation,
}

