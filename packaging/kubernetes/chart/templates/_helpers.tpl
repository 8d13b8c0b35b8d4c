{{/* The name of the release's objects, which the names of its Jobs extend. */}}
{{- define "name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "labels" -}}
app.kubernetes.io/name: pause-sandboxer
app.kubernetes.io/instance: {{ include "name" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: pause-sandboxer
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "metadata" -}}
name: {{ include "name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "labels" . | nindent 2 }}
{{- end }}

{{/* Of a pod: a list of the values and the component. */}}
{{- define "pod.metadata" -}}
{{- $values := (index . 0).Values -}}
labels:
  {{- include "labels" (index . 0) | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "image" -}}
{{- with .Values.image }}
{{- .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{/* The daemon's settings: the JSON of a string, number, boolean or list is also TOML. */}}
{{- define "settings" -}}
{{- range $key, $value := .Values.config }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}

{{/* The Job that changes a node. rollout.sh adds name, node and argument. */}}
{{- define "job" -}}
apiVersion: batch/v1
kind: Job
metadata:
  labels:
    {{- include "labels" . | nindent 4 }}
    app.kubernetes.io/component: installer
spec:
  # Statuses of install.sh, which another attempt would not change. Others are of a node that has
  # gone down, for example.
  podFailurePolicy:
    rules:
      - action: FailJob
        onExitCodes:
          operator: In
          values: [1, 75, 76, 77]
  backoffLimit: 3
  activeDeadlineSeconds: 900
  ttlSecondsAfterFinished: 3600
  template:
    metadata:
      {{- include "pod.metadata" (list . "installer") | nindent 6 }}
    spec:
      restartPolicy: Never
      automountServiceAccountToken: false
      {{- with .Values.installer.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      # Enough to complete `enable`, and to restore all files if containerd does not come up.
      terminationGracePeriodSeconds: 180
      {{- with .Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .Values.installer.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      # The script reaches the node's systemd through process 1.
      hostPID: true
      containers:
        - name: installer
          image: {{ include "image" . | quote }}
          imagePullPolicy: {{ .Values.image.pullPolicy }}
          command: [/usr/local/bin/install.sh]
          env:
            - name: DIRECTORY
              value: {{ .Values.installDirectory }}
            - name: SETTINGS
              value: {{ include "settings" . | trim | quote }}
            - name: ENABLE_OPTIONS
              value: {{ prepend .Values.enableOptions (print "--handler " .Values.runtimeClass.handler) | join " " | quote }}
            - name: SELFTEST_OPTIONS
              value: {{ join " " .Values.selftestOptions | quote }}
            - name: EDIT_CONTAINERD_CONFIG
              value: {{ .Values.editContainerdConfig | quote }}
            {{- with .Values.installer.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          # rollout.sh reports the end of the log as the reason of a failure.
          terminationMessagePolicy: FallbackToLogsOnError
          securityContext:
            privileged: true
          {{- with .Values.installer.resources }}
          resources:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          volumeMounts:
            - name: host
              mountPath: /host
              # Otherwise a file system that is unmounted on the node stays mounted here.
              mountPropagation: HostToContainer
      volumes:
        - name: host
          hostPath:
            path: /
{{- end }}

{{/* What nodes are compared with. */}}
{{- define "revision" -}}
{{ include "job" . | fromYaml | toJson | print .Values.nodeLabel .Values.runtimeClass.name | sha256sum | trunc 10 }}
{{- end }}

{{/* The spec of a Job that runs rollout.sh: a list of the values, the mode, and whether it is the
hook of `helm uninstall`, or of new nodes. */}}
{{- define "coordinator" -}}
{{- $mode := index . 1 }}
{{- $kind := index . 2 }}
{{- with index . 0 -}}
# The status of a rollout that has stopped.
podFailurePolicy:
  rules:
    - action: FailJob
      onExitCodes:
        operator: In
        values: [3]
# A pod that ends otherwise is replaced, and continues.
backoffLimit: 100
template:
  metadata:
    {{- include "pod.metadata" (list . "coordinator") | nindent 4 }}
  spec:
    restartPolicy: Never
    serviceAccountName: {{ include "name" . }}
    {{- with .Values.coordinator.priorityClassName }}
    priorityClassName: {{ . }}
    {{- end }}
    {{- with .Values.imagePullSecrets }}
    imagePullSecrets:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    nodeSelector:
      kubernetes.io/os: linux
      {{- with .Values.coordinator.nodeSelector }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with .Values.coordinator.affinity }}
    affinity:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with .Values.coordinator.tolerations }}
    tolerations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      runAsNonRoot: true
      runAsUser: 65534
      runAsGroup: 65534
      seccompProfile:
        type: RuntimeDefault
    containers:
      - name: coordinator
        image: {{ include "image" . | quote }}
        imagePullPolicy: {{ .Values.image.pullPolicy }}
        args: [{{ $mode }}]
        env:
          - name: RELEASE
            value: {{ include "name" . }}
          - name: NAMESPACE
            value: {{ .Release.Namespace }}
          - name: REVISION
            value: {{ include "revision" . }}{{ if eq $mode "uninstall" }}-removal{{ end }}
          - name: NODES
            value: {{ .Values.nodes | quote }}
          - name: LABEL
            value: {{ .Values.nodeLabel }}
          - name: CLASS
            value: {{ .Values.runtimeClass.name }}
          - name: PARALLEL
            value: {{ .Values.parallel | quote }}
          - name: MAX_FAILURES
            value: {{ .Values.maxFailures | quote }}
          # A new run tries the nodes again that failed in an earlier one.
          - name: RETRY
            value: {{ ne $kind "new" | quote }}
          - name: REFUSE
            value: {{ eq $kind "hook" | quote }}
        terminationMessagePolicy: FallbackToLogsOnError
        securityContext:
          allowPrivilegeEscalation: false
          readOnlyRootFilesystem: true
          capabilities:
            drop: [ALL]
        {{- with .Values.coordinator.resources }}
        resources:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        volumeMounts:
          - name: work
            mountPath: /tmp
    volumes:
      - name: work
        emptyDir: {}
{{- end }}
{{- end }}
