{{- define "embq.fullname" -}}
{{- if contains "embq" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-embq{{ end }}
{{- end }}

{{- define "embq.selector" -}}
app.kubernetes.io/name: embq
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "embq.labels" -}}
{{ include "embq.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "embq.image" -}}
{{ .root.Values.image.registry }}{{ .image }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* URL of the broker for a user; never with a password. */}}
{{- define "embq.brokerUrl" -}}
{{- $broker := .root.Values.broker }}
{{- if $broker.external }}
{{- $parts := splitn "://" 2 $broker.external }}
{{- printf "%s://%s@%s" $parts._0 .user $parts._1 }}
{{- else }}
{{- printf "%s://%s@%s-broker:%d" (ternary "rediss" "redis" $broker.tls) .user (include "embq.fullname" .root) (ternary 6380 6379 $broker.tls) }}
{{- end }}
{{- end }}

{{/* Claim of a folder; "" for none. */}}
{{- define "embq.claim" -}}
{{- $folder := index .root.Values.storage .folder }}
{{- if ne .folder "out" }}{{ $folder.existingClaim }}
{{- else if $folder.enabled }}{{ $folder.existingClaim | default (printf "%s-out" (include "embq.fullname" .root)) }}
{{- end }}
{{- end }}

{{- define "embq.podSecurity" -}}
automountServiceAccountToken: false
# Variables of services in the namespace would look like settings of embq.
enableServiceLinks: false
# The pause container reaps what a service leaves.
shareProcessNamespace: true
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.user }}
  runAsGroup: {{ .Values.group }}
  fsGroup: {{ .Values.group }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- end }}

{{- define "embq.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/*
Labels and spec of the pod of a service.
  root, component; image: its name; args: of embq; user: of the broker; port: of /metrics; grace: seconds; own: its values
  folders: list of "NAME" or "NAME:ro"; path, header: of the health check
*/}}
{{- define "embq.pod" -}}
{{- $root := .root }}
{{- $own := .own -}}
metadata:
  labels: {{- include "embq.labels" . | nindent 4 }}
spec:
  {{- include "embq.podSecurity" $root | nindent 2 }}
  # SIGTERM comes first; what the service has begun is finished.
  terminationGracePeriodSeconds: {{ .grace }}
  {{- with $own.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $own.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $own.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $own.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: embq
      image: {{ include "embq.image" . | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: {{- toYaml .args | nindent 8 }}
      securityContext: {{- include "embq.containerSecurity" $root | nindent 8 }}
      env:
        - {name: EMBQ_BROKER_URL, value: {{ include "embq.brokerUrl" . | quote }}}
        - {name: EMBQ_BROKER_PASSWORD_FILE, value: /run/secrets/embq/password}
        {{- if and $root.Values.broker.ca (or $root.Values.broker.external $root.Values.broker.tls) }}
        - {name: EMBQ_BROKER_CA, value: {{ $root.Values.broker.ca | quote }}}
        {{- end }}
        {{- if eq .component "ui" }}
        - {name: EMBQ_ROOTS, value: {{ join ":" $root.Values.roots | quote }}}
        {{- else }}
        - {name: EMBQ_METRICS, value: "0.0.0.0:{{ .port }}"}
        - {name: EMBQ_ROOTS, value: {{ join ":" $root.Values.roots | quote }}}
        - {name: EMBQ_OUTPUTS, value: {{ join ":" $root.Values.outputs | quote }}}
        {{- end }}
        {{- $service := printf "%s-%s" (include "embq.fullname" $root) .component }}
        {{- $names := list $service }}
        {{- range list "" ".svc" ".svc.cluster.local" }}
        {{- $names = append $names (printf "%s.%s%s" $service $root.Release.Namespace .) }}
        {{- end }}
        # Names of its Service, by which Prometheus and KEDA ask for /metrics.
        - {name: EMBQ_ALLOW_HOSTS, value: {{ join "," $names | quote }}}
        - {name: EMBQ_SPOOL, value: /state}
        - {name: XDG_STATE_HOME, value: /state}
        {{- if and (has "staging" .folders) $root.Values.storage.staging.existingClaim }}
        - {name: EMBQ_STAGING, value: /staging}
        {{- end }}
        {{- if $own.gpus }}
        - {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility"}
        {{- end }}
        {{- if $root.Values.secrets.storage }}
        - {name: AWS_SHARED_CREDENTIALS_FILE, value: /run/secrets/storage/aws}
        - {name: AWS_CONFIG_FILE, value: /run/secrets/storage/aws-config}
        - {name: GOOGLE_APPLICATION_CREDENTIALS, value: /run/secrets/storage/google.json}
        - {name: HF_TOKEN_PATH, value: /run/secrets/storage/hub-token}
        {{- end }}
        {{- range $name, $value := $root.Values.env }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
      ports: [{name: http, containerPort: {{ .port }}}]
      # A service that cannot go on ends itself; one that waits for the broker is not to be restarted.
      readinessProbe:
        httpGet:
          path: {{ .path | default "/healthz" }}
          port: http
          # The pages take requests by their own names only.
          httpHeaders: [{name: Host, value: localhost}]
        periodSeconds: 15
        timeoutSeconds: 10
      {{- if eq .component "ui" }}
      # Until no proxy sends it requests any more.
      lifecycle: {preStop: {exec: {command: [sleep, "5"]}}}
      {{- end }}
      {{- $limits := deepCopy ($own.resources.limits | default dict) }}
      {{- if $own.gpus }}{{ $_ := set $limits $own.gpuResource $own.gpus }}{{ end }}
      resources: {{- toYaml (mustMergeOverwrite (deepCopy $own.resources) (dict "limits" $limits)) | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: state, mountPath: /state}
        - {name: broker-user, mountPath: /run/secrets/embq, readOnly: true}
        {{- if $root.Values.secrets.storage }}
        - {name: storage, mountPath: /run/secrets/storage, readOnly: true}
        {{- end }}
        {{- if $own.shm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- range .folders }}
        {{- $folder := trimSuffix ":ro" . }}
        {{- if or (eq $folder "models") (include "embq.claim" (dict "root" $root "folder" $folder)) }}
        - {name: {{ $folder }}, mountPath: /{{ $folder }}, readOnly: {{ hasSuffix ":ro" . }}}
        {{- end }}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {sizeLimit: 2Gi}}
    - {name: state, emptyDir: {}}
    - {name: broker-user, secret: {secretName: {{ index $root.Values.secrets .user }}, defaultMode: 0440}}
    {{- if $root.Values.secrets.storage }}
    - {name: storage, secret: {secretName: {{ $root.Values.secrets.storage }}, defaultMode: 0440}}
    {{- end }}
    {{- if $own.shm }}
    # Kubernetes's 64 MB end in a bus error where libraries share tensors.
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $own.shm }}}}
    {{- end }}
    {{- range .folders }}
    {{- $folder := trimSuffix ":ro" . }}
    {{- $claim := include "embq.claim" (dict "root" $root "folder" $folder) }}
    {{- if $claim }}
    - {name: {{ $folder }}, persistentVolumeClaim: {claimName: {{ $claim }}}}
    {{- else if eq $folder "models" }}
    - {name: models, emptyDir: {}}
    {{- end }}
    {{- end }}
{{- end }}
